"""Serves releases from this host's data folder (`workers/engine/driver.py`), which Caddy and the watchdog follow.

A release is unpacked only if its digest matches the record. Each change that visitors can see is one rename. So a
worker may be killed at any time, and the host keeps serving without Redis and the storage.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
import structlog

from gateway.accounts.domain_names import apps_host
from gateway.cancellation import run_in_thread
from gateway.deploys.addresses import url_of
from gateway.deploys.release import ReleaseArchive
from gateway.deploys.runtime_log import RuntimeLog
from gateway.deploys.serving import Wanted
from gateway.deploys.states import DeployError, StorageFailed
from gateway.errors import StorageUnavailable
from gateway.loops import until
from gateway.settings import Settings
from gateway.storage import fetch_object, open_storage
from workers.engine.driver import Hosts, NotStopped, Place, ReleaseMissing, Target, Visits, until_stored
from workers.engine.health import Listening, NotUp, request_health, until_up
from workers.engine.packing import DataError
from workers.hosting import archives, caddy, disk
from workers.hosting.archive_files import BadArchive
from workers.hosting.archives import ARCHIVE_BYTES
from workers.hosting.release_files import read_release_manifest, write_environment, write_url
from workers.hosting.releases import Releases, Site, link_folder
from workers.hosting.sleep import ask_listening
from workers.hosting.visits import VisitLog
from workers.hosting.watchdog import LIMITS, control_path, is_running, read_state
from workers.sandbox.cgroups import read_available_memory
from workers.sandbox.removal import remove_folder
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

FETCHES = 4  # at once
MIN_FREE_BYTES = LIMITS.memory // 2  # of memory, to start one more app; most apps use far less than their limit
START_SECONDS = 60.0  # in which a start command must answer
SERVER_SECONDS = 30.0  # in which Caddy must start
POLL_SECONDS = 0.2  # between checks of a start command
STOP_SECONDS = 15.0  # in which a release must stop before another one starts
STOP_POLL_SECONDS = 0.05
RETURN_SECONDS = 10.0  # in which an app that is served again should answer
OUTPUT_LINES = 100  # of a start command, copied to the deploy's log


class HostPlaces:
    """The links of host names to the sites. Implements `Places`."""

    def __init__(self, settings: Settings, releases: Releases) -> None:
        self._settings, self._releases = settings, releases

    async def list_apps(self) -> set[str]:
        names = await run_in_thread(self._releases.list_names)
        return {*self._releases.list_apps()} | {Site(folder).app_id for folder in names}

    async def list_places(self, *app_ids: str) -> list[Place]:
        return await run_in_thread(self._list_places, app_ids)

    def _list_places(self, app_ids: Collection[str]) -> list[Place]:
        names = self._releases.list_names()
        sites = [site for app_id in app_ids for site in self._releases.sites_of(app_id)]
        found = [
            Place(site.account, site.app_id, site.variant, self._read_hosts(names.pop(site.folder, ())))
            for site in sites
            if site.current is not None or not site.is_preview
        ]
        left = [site for site in map(Site, names) if site.app_id in app_ids]  # which serve nothing
        return found + [Place("", site.app_id, site.variant, self._read_hosts(names[site.folder])) for site in left]

    def _read_hosts(self, names: Iterable[str]) -> Hosts:
        return {name: urlsplit(self._releases.read_redirect(name)).hostname or "" for name in names}

    def places_at(self, host: str) -> list[Place]:
        site = self._releases.site_at(host)
        return [] if site is None else [Place(site.account, site.app_id, site.variant)]

    async def rename(self, place: Place, hosts: Hosts) -> None:
        """An app that was never live gets a site without a release."""
        site = self._releases.find_site(place.app, place.address)
        if hosts and not site.is_preview:
            site = self._releases.site(place.account, place.app)
            site.mark_unpublished()
        if site.current is not None or not site.is_preview:
            self.name(site, hosts)
        await run_in_thread(self._releases.serve_no_more, site, place.hosts.keys() - hosts.keys())

    def name(self, site: Site, hosts: Hosts) -> None:
        """Lets these host names lead to the site."""
        for name in hosts:
            self._releases.serve_as(name, site)
        # Those that redirect to none come first, so that no two redirect to each other.
        for name, to in sorted(hosts.items(), key=lambda item: item[1]):
            self._releases.redirect(name, url_of(to, self._settings) if to else "")

    async def leave(self, place: Place) -> None:
        await self.rename(place, {})


class HostDriver:
    """Serves releases from this host's data folder. Implements `Driver`.

    `mark_suspended` marks a site whose app is suspended. `bring_data` brings the data of an app to this host, by its
    account and id.
    """

    def __init__(
        self,
        settings: Settings,
        mark_suspended: Callable[[Site], None] = lambda _: None,
        bring_data: Callable[[str, str], Awaitable[None]] | None = None,
        *,
        start_seconds: float = START_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._settings, self._mark_suspended, self._bring_data = settings, mark_suspended, bring_data
        self._domain = apps_host(settings)
        self._releases, self._storage = Releases(Path(settings.data_dir)), open_storage(settings)
        self.places = HostPlaces(settings, self._releases)
        self._visits = VisitLog(self._releases.folder)
        self._fetched = self._releases.folder / "fetched"
        self._fetching = asyncio.Semaphore(FETCHES)
        self.outage = asyncio.Event()
        self.return_seconds = RETURN_SECONDS
        self._start_seconds, self._poll_seconds = start_seconds, poll_seconds

    async def open(self) -> None:
        """Removes what the worker before this one was fetching."""
        await run_in_thread(remove_folder, self._fetched)
        self._fetched.mkdir(mode=0o700)

    def lacks(self, wanted: Wanted) -> bool:
        site = self._releases.find_site(wanted.app, wanted.address)
        return bool(wanted.serves) and not site.release(wanted.serves).is_dir()

    def note(self, wanted: Wanted) -> None:
        """Does nothing: the links in the data folder have all that later steps need."""

    async def read_visits(self) -> Visits:
        def read() -> Visits:
            found: Visits = {}
            for name, visited_at in self._visits.read().items():
                for place in self.places.places_at(name):
                    key = place.account, place.app, place.address
                    found[key] = max(visited_at, found.get(key, 0.0))
            return found

        return await run_in_thread(read)

    def _site(self, wanted: Wanted) -> Site:
        return self._releases.site(wanted.account, wanted.app, wanted.address)

    def _find_release(self, target: Target) -> tuple[Site, Path]:
        site = self._site(target.wanted)
        return site, site.release(target.deploy)

    async def prepare(self, target: Target) -> None:
        wanted = target.wanted
        await run_in_thread(self._releases.empty_foreign_folder, wanted.account, wanted.app)
        self._mark_suspended(self._site(wanted))
        if wanted.runs and self._bring_data is not None:
            try:
                await self._bring_data(wanted.account, wanted.app)
            except StorageUnavailable as error:
                raise StorageFailed(error) from None
            except (DataError, OSError) as error:
                logger.error("data.not_fetched", app=wanted.app, reason=str(error))
                reason = "the data of the app cannot be brought to its host; the operator must help"
                raise DeployError(reason, service_fault=True) from None

    # -- getting a release -----------------------------------------------------------------------------------

    async def place(self, target: Target) -> None:
        site, release = self._find_release(target)
        expected = target.wanted.releases.get(target.deploy)
        if expected is None:
            raise ReleaseMissing(target.deploy)
        archive = ReleaseArchive(expected.digest, expected.size)
        if archives.read_record(release) != archive:
            async with self._fetching:
                await run_in_thread(remove_folder, release)  # left by a worker that was stopped
                fresh = await self._make_folder(site.app_id, target.deploy, archive)
                archives.write_record(fresh, archive)
                fresh.rename(release)
        write_environment(release, expected.environment)
        account, limit = target.wanted.account, self._settings.account_disk
        await run_in_thread(disk.require_room, self._releases, account, release, limit)
        if target.is_new and (release / "start").exists() and not self.runs(target.deploy):
            _require_memory(site)

    async def _make_folder(self, app_id: str, deploy_id: str, archive: ReleaseArchive) -> Path:
        """Makes a folder with the files of the archive. Raises DeployError."""
        fresh, packed, began = self._fetched / deploy_id, self._fetched / f"{deploy_id}.tar.gz", time.monotonic()
        await run_in_thread(remove_folder, fresh)
        for same in (self._releases.built / deploy_id, *await run_in_thread(self._releases.list_releases, app_id)):
            if archives.read_record(same) == archive and await link_folder(same, fresh):
                return fresh
        key = archives.archive_key(app_id, deploy_id)
        fetch = partial(fetch_object, self._storage, key, packed, ARCHIVE_BYTES)
        try:
            await until_stored(self.outage, deploy_id, fetch)
            fresh.mkdir(mode=0o755)
            await archives.unpack(packed, archive, fresh)
            logger.info("sites.fetched", deploy=deploy_id, bytes=archive.size, seconds=time.monotonic() - began)
        except BadArchive as error:
            raise DeployError(str(error), service_fault=True) from None
        finally:
            packed.unlink(missing_ok=True)
        return fresh

    # -- running it ------------------------------------------------------------------------------------------

    async def start(self, target: Target) -> None:
        """The watchdog keeps it running. Its variables may be sealed with another key than before."""
        _, release = self._find_release(target)
        if (release / "start").exists():
            if (expected := target.wanted.releases.get(target.deploy)) is not None:
                write_environment(release, expected.environment)
            write_url(release, url_of(target.host(self._settings.apps_domain), self._settings))
            self._releases.run(release)

    async def until_answers(self, target: Target) -> None:
        _, release = self._find_release(target)
        if not (release / "start").exists():
            if target.is_new and target.wanted.step == "check":  # a host that begins with a later step has no Caddy yet
                await self._visit(target, caddy.check_host(release))
            return

        async def request() -> None:
            if not (socket := read_state(self._releases.folder, target.deploy).socket):
                raise NotUp("the app was not started; is the `sites` worker running?")
            await self._request_health(target, Path(socket), target.host(self._domain))

        def require_running() -> None:
            if (state := read_state(self._releases.folder, target.deploy)).exits:
                raise DeployError(state.last)

        await until_up(
            target.release,
            request,
            lambda: _find_listening(control_path(self._releases.folder, target.deploy)),
            require_running,
            seconds=self._start_seconds,
            poll_seconds=self._poll_seconds,
        )

    async def read_output(self, target: Target) -> list[str]:
        return await RuntimeLog(str(self._releases.folder)).tail(target.deploy, OUTPUT_LINES)

    def runs(self, deploy: str) -> bool:
        return (self._releases.running / deploy).is_symlink()

    def excludes(self, target: Target, former: str) -> bool:
        site, release = self._find_release(target)
        return not site.is_preview and self.runs(former) and not _may_overlap(site.release(former), release)

    def gives_way(self, wanted: Wanted) -> bool:
        return self._site(wanted).find_stopped(wanted.deploy) is not None

    def is_suspended(self, target: Target) -> bool:
        return self._site(target.wanted).is_suspended

    async def hold(self, target: Target, former: str) -> None:
        self._site(target.wanted).hold_requests(target.wanted.deploy)

    async def stop(self, target: Target, former: str) -> None:
        self._releases.stop_soon(former)

        async def has_stopped() -> bool:
            return not self._releases.is_stopping(former)

        if not await until(has_stopped, STOP_POLL_SECONDS, STOP_SECONDS):
            state = read_state(self._releases.folder, former)
            if is_running(state.keeper, state.began):  # otherwise there is no `sites` worker that would notice
                raise NotStopped

    def list_others(self, target: Target) -> list[str]:
        names = [path.name for path in self._site(target.wanted).releases()]
        return [name for name in names if name != target.deploy and self.runs(name)]

    def find_former(self, target: Target) -> str:
        site = self._site(target.wanted)
        former = site.find_stopped(target.deploy) or site.find_replaced(target.deploy)
        return former.name if former is not None else ""

    async def retire(self, target: Target, others: Collection[str]) -> None:
        for name in others:
            self._releases.stop(name)
        await run_in_thread(self._site(target.wanted).prune)

    async def remove(self, target: Target) -> None:
        self._releases.stop(target.deploy)
        await run_in_thread(remove_folder, self._find_release(target)[1])

    async def end(self, target: Target) -> None:
        await run_in_thread(self._releases.remove_site, self._site(target.wanted))

    # -- visitors --------------------------------------------------------------------------------------------

    def routed(self, wanted: Wanted) -> str:
        site = self._site(wanted)
        current = site.current
        return current if current is not None and site.release(current).is_dir() else ""

    async def route(self, target: Target, hosts: Hosts | None) -> None:
        site, wanted = self._site(target.wanted), target.wanted
        if target.deploy != wanted.deploy:
            site.undo(wanted.deploy)
        site.swap(target.deploy, canary=wanted.step == "canary")
        self.places.name(site, hosts or {})
        site.release_requests()
        if not target.is_new:
            site.confirm(target.deploy)

    async def unroute(self, target: Target) -> None:
        self._site(target.wanted).undo(target.deploy)

    async def visit(self, target: Target) -> None:
        await self._visit(target, target.host(self._domain))

    async def _visit(self, target: Target, host: str) -> None:
        """Raises DeployError unless Caddy, which starts after this process, answers for the host name."""
        socket = caddy.canary_socket(self._releases.folder)
        await until(partial(caddy.is_listening, socket), self._poll_seconds, SERVER_SECONDS)
        if caddy.read_process(self._releases.folder) is None:
            raise DeployError("no process serves the apps; is the `sites` worker running?", service_fault=True)
        await self._request_health(target, socket, host)

    async def _request_health(self, target: Target, socket: Path, host: str) -> None:
        with caddy.connectable(socket) as path:
            await request_health(target.release, "http://localhost", host, aiohttp.UnixConnector(path))

    def count_exits(self, target: Target) -> int:
        return read_state(self._releases.folder, target.deploy).exits

    # -- afterwards ------------------------------------------------------------------------------------------

    async def tidy(self, gone: Set[str], deploys: Set[str]) -> None:
        await run_in_thread(self._releases.tidy, gone, deploys)


async def _find_listening(control: Path) -> Listening | None:
    """Asks the relay of an app where the app listens. Returns None if it does not say."""
    with suppress(OSError, ValueError, msgspec.MsgspecError):
        return msgspec.json.decode(await ask_listening(control), type=Listening)
    return None


def _require_memory(site: Site) -> None:
    if (free := read_available_memory()) < MIN_FREE_BYTES:
        logger.error("deploys.no_memory", app=site.app_id, available_mib=free // MIB)
        reason = "this machine has no memory left for another app; stop one, or try again later"
        raise DeployError(reason, service_fault=True)


def _may_overlap(*releases: Path) -> bool:
    """Returns whether the releases may run at the same time, on the same data."""
    manifests = [read_release_manifest(release) for release in releases if (release / "start").exists()]
    return len(manifests) < len(releases) or all(each is None or each.overlap for each in manifests)
