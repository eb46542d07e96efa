"""Serves releases from this host's data folder (`applier.py`): fetch → check → swap → canary, and their undoing.

A release is unpacked only if its digest matches the record. Each step that visitors can see is one rename. So a worker
may be killed at any time, and the host keeps serving without Redis and the storage.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import aiohttp
import msgspec
import structlog

from gateway import storage
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.cancellation import end_if_canceled, run_in_background, run_in_thread
from gateway.deploys.addresses import host, hosts_of, url_of
from gateway.deploys.release import ReleaseArchive
from gateway.deploys.serving import Wanted
from gateway.deploys.states import AppGone, DeployError
from gateway.errors import StorageUnavailable
from gateway.keys import APP
from gateway.redis.client import Store, until_redis_answers
from gateway.redis.listener import Listener
from gateway.redis.scripts import CHANGES_CHANNEL
from gateway.settings import Settings
from gateway.storage import open_storage, until_storage_answers
from workers.engine.packing import DataError
from workers.hosting import archives, caddy, disk
from workers.hosting.applier import ReleaseMissing, Target
from workers.hosting.archive_files import BadArchive
from workers.hosting.archives import ARCHIVE_BYTES
from workers.hosting.release_files import read_release_manifest, write_environment, write_url
from workers.hosting.releases import Releases, Site, link_folder
from workers.hosting.watchdog import LIMITS, is_running, output_path, read_state
from workers.sandbox.cgroups import read_available_memory
from workers.sandbox.removal import remove_folder
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

FETCHES = 4  # at once
MIN_FREE_BYTES = LIMITS.memory // 2  # of memory, to start one more app; most apps use far less than their limit
START_SECONDS = 60.0  # in which a start command must answer
SERVER_SECONDS = 30.0  # in which Caddy must start
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=10)
POLL_SECONDS = 0.2  # between checks of a start command
DRAIN_SECONDS = 2.0  # for requests in progress, before a replaced release is stopped
STOP_SECONDS = 15.0  # in which a release must stop before another one starts
STOP_POLL_SECONDS = 0.05
RETURN_SECONDS = 10.0  # in which an app that is served again should answer
OUTPUT_LINES = 100  # of a start command, copied to the deploy's log


async def find_app(registry: Registry, app: str) -> App | None:
    """Returns the app. Waits for Redis if necessary. An app does not get a domain that another app claimed first."""
    found = await until_redis_answers(lambda: registry.find_app(app))
    if found is None or not found.customDomainVerified:
        return found
    allowed = await until_redis_answers(partial(registry.domains.is_owner, found))
    return found if allowed else msgspec.structs.replace(found, customDomainVerified=False)


class Serving:
    """Serves releases from this host's data folder. Implements `Applier`.

    `find_app` returns the record of an app by its id or name. `bring_data` brings the data of an app to this host, by
    its account and id. `mark_suspended` marks a site whose app is suspended.
    """

    def __init__(
        self,
        settings: Settings,
        find_app: Callable[[str], Awaitable[App | None]],
        mark_suspended: Callable[[Site], None] = lambda _: None,
        bring_data: Callable[[str, str], Awaitable[None]] | None = None,
    ) -> None:
        self._settings, self._find_app = settings, find_app
        self._mark_suspended, self._bring_data = mark_suspended, bring_data
        self._domain = settings.apps_domain.partition(":")[0]
        self._releases, self._storage = Releases(Path(settings.data_dir)), open_storage(settings)
        self._addresses_lock = asyncio.Lock()
        self._fetched = self._releases.folder / "fetched"
        self._fetching = asyncio.Semaphore(FETCHES)
        self._checked: set[str] = set()  # deploys whose releases have passed the check here, and have not ended
        self.outage = asyncio.Event()

    async def open(self) -> None:
        """Removes what the worker before this one was fetching."""
        await run_in_thread(remove_folder, self._fetched)
        self._fetched.mkdir(mode=0o700)

    def lacks(self, wanted: Wanted) -> bool:
        return bool(wanted.serves) and not self._releases.has(wanted.app, wanted.address, wanted.serves)

    def note(self, wanted: Wanted) -> None:
        """Does nothing: the links in the data folder have all that later steps need."""

    def _site(self, wanted: Wanted) -> Site:
        return self._releases.site(wanted.account, wanted.app, wanted.address)

    def _find_release(self, target: Target) -> tuple[Site, Path]:
        site = self._site(target.wanted)
        return site, site.release(target.deploy)

    async def prepare(self, target: Target) -> None:
        wanted = target.wanted
        await run_in_thread(self._releases.claim_folder, wanted.account, wanted.app)
        self._mark_suspended(self._site(wanted))
        if wanted.runs and self._bring_data is not None:
            try:
                await self._bring_data(wanted.account, wanted.app)
            except StorageUnavailable:
                raise DeployError("the storage does not answer; deploy again later") from None
            except (DataError, OSError) as error:
                logger.error("data.not_fetched", app=wanted.app, reason=str(error))
                raise DeployError("the data of the app cannot be brought to its host; the operator must help") from None

    # -- fetch -----------------------------------------------------------------------------------------------

    async def fetch(self, target: Target) -> None:
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

    async def _make_folder(self, app_id: str, deploy_id: str, archive: ReleaseArchive) -> Path:
        """Makes a folder with the files of the archive. Raises DeployError."""
        fresh, packed, began = self._fetched / deploy_id, self._fetched / f"{deploy_id}.tar.gz", time.monotonic()
        await run_in_thread(remove_folder, fresh)
        for same in (self._releases.built / deploy_id, *await run_in_thread(self._releases.list_releases, app_id)):
            if archives.read_record(same) == archive and await link_folder(same, fresh):
                return fresh
        try:
            if not await until_storage_answers(lambda: self._try_to_fetch(app_id, deploy_id, packed)):
                raise ReleaseMissing(deploy_id)
            fresh.mkdir(mode=0o755)
            await archives.unpack(packed, archive, fresh)
            logger.info("sites.fetched", deploy=deploy_id, bytes=archive.size, seconds=time.monotonic() - began)
        except StorageUnavailable:
            raise DeployError("the storage does not answer; deploy again later") from None
        except BadArchive as error:
            raise DeployError(str(error)) from None
        finally:
            packed.unlink(missing_ok=True)
        return fresh

    async def _try_to_fetch(self, app_id: str, deploy_id: str, path: Path) -> bool:
        key = archives.archive_key(app_id, deploy_id)
        try:
            found = await storage.fetch_object(self._storage, key, path, ARCHIVE_BYTES)
        except StorageUnavailable:
            self.outage.set()
            raise
        self.outage.clear()
        return found

    # -- check, swap, canary ---------------------------------------------------------------------------------

    async def check(self, target: Target) -> None:
        site, release = self._find_release(target)
        if not (release / "start").exists():
            if not (release / "files" / "index.html").is_file():
                raise DeployError("GET / returned 404")
        elif site.is_suspended and not target.is_new:
            self._start(target)  # the watchdog runs it once the suspension is lifted
        else:
            await self._check_start_command(target, site, release)
            self._checked.add(target.deploy)

    async def _check_start_command(self, target: Target, site: Site, release: Path) -> None:
        if (free := read_available_memory()) < MIN_FREE_BYTES:
            logger.error("deploys.no_memory", app=site.app_id, available_mib=free // MIB)
            raise DeployError("this machine has no memory left for another app; stop one, or try again later")
        if site.current is not None:
            await self._stop_first(site, site.release(site.current), release, target.deploy)
        self._start(target)
        why, ends = "the app was not started; is the `sites` worker running?", time.monotonic() + START_SECONDS
        try:
            while time.monotonic() < ends:
                state = read_state(self._releases.folder, release.name)
                if state.exits:
                    raise DeployError(state.last)
                if state.socket:
                    try:
                        await _request_root(Path(state.socket), self._host(target))
                    except DeployError as error:
                        why = str(error)
                    else:
                        return
                await asyncio.sleep(POLL_SECONDS)
            raise DeployError(f"the start command did not answer within {START_SECONDS:.0f} seconds: {why}")
        finally:
            self._copy_output(target)

    def _start(self, target: Target) -> None:
        """Starts the start command of the release, if it has one. The watchdog keeps it running."""
        _, release = self._find_release(target)
        if (release / "start").exists():
            name = hosts_of(target.app, target.wanted.address, self._settings.apps_domain)[0]
            write_url(release, url_of(name, self._settings))
            self._releases.run(release)

    async def _stop_first(self, site: Site, former: Path, release: Path, deploy_id: str) -> None:
        """Stops the former release if the two must not run side by side. Requests wait. Raises DeployError."""
        running = self._releases.running / former.name
        if site.is_preview or former == release or not running.is_symlink() or _may_overlap(former, release):
            return
        site.hold_requests(deploy_id)
        self._releases.stop_soon(former.name)
        ends = time.monotonic() + STOP_SECONDS
        while self._releases.is_stopping(former.name):
            if time.monotonic() > ends:
                state = read_state(self._releases.folder, former.name)
                if is_running(state.keeper, state.began):
                    raise DeployError("the release that it replaces could not be stopped; deploy again")
                return  # without a `sites` worker, nobody has noticed
            await asyncio.sleep(STOP_POLL_SECONDS)

    def _copy_output(self, target: Target) -> None:
        path = output_path(self._releases.folder, target.deploy)
        if path.exists():
            target.output.extend(path.read_text(errors="replace").splitlines()[-OUTPUT_LINES:])

    async def serve(self, target: Target) -> None:
        """If the start command does not answer, a canary fails. Other steps serve the release anyway."""
        site, release = self._find_release(target)
        if site.current == target.deploy and release.is_dir():
            if site.find_stopped(target.wanted.deploy) is None:  # otherwise another release is checked on its data
                self._start(target)
            return
        await self.fetch(target)
        if target.deploy not in self._checked:
            try:
                await self.check(target)
            except DeployError:
                if target.is_new:
                    raise
        await self._swap(target, site)
        if not target.is_new:
            site.confirm(target.deploy)

    async def _swap(self, target: Target, site: Site) -> None:
        async with self._addresses_lock:
            # Another account may have taken the app's name since the deploy began.
            app = await self._find_app(site.app_id)
            if app is None or app.account != target.wanted.account:
                raise AppGone
            hosts = hosts_of(target.app, site.variant, self._domain)
            for name in hosts:
                if await self._is_another_app_s(name, target.app, site):
                    raise DeployError(f"the address {name} belongs to another app; rename one of the two")
            site.swap(target.deploy, canary=target.wanted.step == "canary")
            for name in hosts:
                self._releases.serve_as(name, site)
            site.release_requests()

    async def _is_another_app_s(self, name: str, app: App, site: Site) -> bool:
        """Returns whether another app is served at the host name, or has it as its own name."""
        served = self._releases.site_at(name)
        if served is not None and served.app_id != app.id:
            owner = await self._find_app(served.app_id)
            if (
                owner is not None
                and owner.account == served.account
                and name in hosts_of(owner, served.variant, self._domain)
            ):
                return True
        namesake = await self._find_app(name.partition(".")[0]) if site.is_preview else None
        return namesake is not None and namesake.id != app.id

    async def probe(self, target: Target) -> None:
        """Raises DeployError unless Caddy answers for the app, and the start command keeps running."""
        await self._wait_for_server()
        if caddy.read_process(self._releases.folder) is None:
            raise DeployError("no process serves the apps; is the `sites` worker running?")
        await _request_root(caddy.canary_socket(self._releases.folder), self._host(target))
        if exits := read_state(self._releases.folder, target.deploy).exits:
            self._copy_output(target)
            raise DeployError(f"the start command exited {exits} time{'' if exits == 1 else 's'}")

    async def _wait_for_server(self) -> None:
        """Waits for this host's Caddy, which starts after this process."""
        ends, socket = time.monotonic() + SERVER_SECONDS, caddy.canary_socket(self._releases.folder)
        while not await caddy.is_listening(socket) and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    # -- afterwards ------------------------------------------------------------------------------------------

    async def finish(self, target: Target) -> None:
        site, _ = self._find_release(target)
        site.confirm(target.deploy)
        self._checked.discard(target.deploy)
        replaced = [path.name for path in site.releases() if path.name != site.current]
        if any((self._releases.running / name).is_symlink() for name in replaced):
            await asyncio.sleep(DRAIN_SECONDS)
        for name in replaced:
            self._releases.stop(name)
        await run_in_thread(site.prune)

    async def resume(self, target: Target) -> None:
        site, release = self._find_release(target)
        self._checked.discard(target.deploy)
        replaced = site.find_stopped(target.deploy) or site.find_replaced(target.deploy)
        if replaced is not None and (replaced / "start").exists():
            await self._stop_first(site, release, replaced, target.deploy)
            self._releases.run(replaced)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETURN_SECONDS):
                    await self._until_it_answers(replaced, self._host(target))
        undone = site.undo(target.deploy)
        site.release_requests()
        if undone:
            await asyncio.sleep(DRAIN_SECONDS)

    async def remove(self, target: Target) -> None:
        await self.resume(target)
        self._releases.stop(target.deploy)
        await run_in_thread(remove_folder, self._find_release(target)[1])

    async def _until_it_answers(self, release: Path, host_name: str) -> None:
        while True:
            state = read_state(self._releases.folder, release.name)
            if state.socket:
                with suppress(DeployError):
                    return await _request_root(Path(state.socket), host_name)
            await asyncio.sleep(POLL_SECONDS)

    async def tidy(self, deploys: Set[str]) -> None:
        async with self._addresses_lock:
            apps = await self._update_addresses(self._releases.sites())
        await run_in_thread(self._releases.tidy, apps, deploys)

    # -- addresses -------------------------------------------------------------------------------------------

    async def _update_addresses(self, sites: Iterable[Site], app_id: str = "") -> Set[str]:
        """Serves the apps of the sites at their present addresses only. Returns the ids of the existing apps.

        The sites are all sites of this host, or those of one app.
        """
        apps: dict[str, App | None] = {}
        unread: set[str] = set()
        addresses: dict[str, tuple[App, Site]] = {}
        # Live sites come last and win, because an app's name may equal the host name of another app's preview.
        for site in sorted(sites, key=lambda site: (site.variant == "live", site.app_id)):
            if site.app_id not in apps:
                try:
                    apps[site.app_id] = await self._find_app(site.app_id)
                except msgspec.MsgspecError as error:  # one damaged record must not affect the others
                    logger.error("app.unreadable", app=site.app_id, error=str(error))
                    apps[site.app_id] = None
                    unread.add(site.app_id)
            app = apps[site.app_id]
            if app is not None and app.account != site.account:
                app = apps[site.app_id] = None
            if app is not None and site.current is not None:
                addresses |= dict.fromkeys(hosts_of(app, site.variant, self._domain), (app, site))
        for name, (app, site) in addresses.items():
            if not app_id or not await self._is_another_app_s(name, app, site):
                self._releases.serve_as(name, site)
        if not unread:
            await run_in_thread(self._releases.serve_only, addresses, app_id)
        return unread | {known for known, app in apps.items() if app is not None}

    async def follow_app(self, name: str) -> None:
        """Serves the app with this name, and one that had it before, at their present addresses."""
        async with self._addresses_lock:
            app = await self._find_app(name)
            ids = {app.id} if app is not None else set[str]()
            if former := self._releases.site_at(host(name, "live", None, self._domain)):
                ids.add(former.app_id)
            for app_id in ids:
                await self._update_addresses(self._releases.sites_of(app_id), app_id)

    # -- names -----------------------------------------------------------------------------------------------

    def _host(self, target: Target) -> str:
        return hosts_of(target.app, target.wanted.address, self._domain)[0]


async def follow_changes(store: Store, follow_app: Callable[[str], Awaitable[None]]) -> NoReturn:
    """Calls `follow_app` with the id or name of an app whose record has changed: its name, domain or account.

    What is announced while there is no subscription, `tidy` finds.
    """
    changed, woken = set[str](), asyncio.Event()

    def note(_: str, key: str) -> None:
        prefix, _, name = key.partition(":")
        if prefix == APP:
            changed.add(name)
            woken.set()

    listener = Listener(store, CHANGES_CHANNEL, on_message=note, loss_event="sites.changes_lost")
    async with run_in_background(listener.run()):
        while True:
            end_if_canceled()
            await woken.wait()
            woken.clear()
            while changed:
                name = changed.pop()
                try:
                    await follow_app(name)
                except Exception as error:  # a damaged record or a full disk must not affect the other apps
                    logger.error("sites.app_not_followed", app=name, exc_info=error)


async def _request_root(socket: Path, host_name: str) -> None:
    with caddy.connectable(socket) as path:
        await request_root("http://localhost/", host_name, aiohttp.UnixConnector(path))


async def request_root(url: str, host_name: str, connector: aiohttp.BaseConnector | None = None) -> None:
    """Requests an app's `/`. Raises DeployError unless the status is 2xx or 3xx."""
    try:
        async with (
            aiohttp.ClientSession(timeout=REQUEST_TIMEOUT, connector=connector) as client,
            client.get(url, headers={"Host": host_name}, allow_redirects=False) as answer,
        ):
            status = answer.status
    except (aiohttp.ClientError, TimeoutError) as error:
        late = isinstance(error, TimeoutError)
        raise DeployError("GET / timed out" if late else "GET / got no answer") from None
    if not 200 <= status < 400:
        raise DeployError(f"GET / returned {status}")


def _may_overlap(*releases: Path) -> bool:
    """Returns whether the releases may run at the same time, on the same data."""
    manifests = [read_release_manifest(release) for release in releases if (release / "start").exists()]
    return len(manifests) < len(releases) or all(each is None or each.overlap for each in manifests)
