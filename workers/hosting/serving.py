"""Serves releases on this host: health check → swap → canary, and the undoing of these steps.

Each step that visitors can see is one rename. So a worker may be killed at any time, and the next worker undoes its
deploys.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Set
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

import aiohttp
import msgspec
import structlog

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.cancellation import end_if_canceled, finish_despite_cancellation, run_in_background
from gateway.deploys.addresses import host, url_of
from gateway.deploys.states import Deploy
from gateway.keys import APP
from gateway.redis.client import Store, until_redis_answers
from gateway.redis.listener import Listener
from gateway.redis.scripts import CHANGES_CHANNEL
from gateway.settings import Settings
from workers.hosting import caddy
from workers.hosting.archives import ReleaseArchive
from workers.hosting.release_files import read_release_manifest, write_url
from workers.hosting.releases import Releases, Site, remove_folder
from workers.hosting.watchdog import LIMITS, is_running, output_path, read_state
from workers.sandbox.cgroups import read_available_memory
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

P = ParamSpec("P")
R = TypeVar("R")

MIN_FREE_BYTES = LIMITS.memory // 2  # of memory, to start one more app; most apps use far less than their limit
START_SECONDS = 60.0  # in which a start command must answer
SERVER_SECONDS = 30.0  # in which Caddy must start
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=10)
POLL_SECONDS = 0.2  # between checks of a start command
DRAIN_SECONDS = 2.0  # for requests in progress, before a replaced release is stopped
STOP_SECONDS = 15.0  # in which a release must stop before another one starts
STOP_POLL_SECONDS = 0.05
RETURN_SECONDS = 10.0  # in which an app that is served again should answer
OVERDUE_SECONDS = 90.0  # after the end of a canary, when an unfinished canary has no builder
OUTPUT_LINES = 100  # of a start command, copied to the deploy's log


class DeployError(Exception):
    """A reason for the failure of a deploy. Account holders see the message."""


class Job(msgspec.Struct, frozen=True):
    deploy: Deploy
    app: App
    write_line: Callable[[str], None]  # to the deploy's log
    record_commit: Callable[[str], Awaitable[None]]
    record_archive: Callable[[ReleaseArchive], Awaitable[None]]


async def find_app(registry: Registry, app: str) -> App | None:
    """Returns the app. Waits for Redis if necessary. An app does not get a domain that another app claimed first."""
    found: App | None = await until_redis_answers(lambda: registry.find_app(app))
    if found is None or not found.customDomainVerified:
        return found
    own: App = found
    allowed: bool = await until_redis_answers(lambda: registry.domains.is_owner(own))
    return own if allowed else msgspec.structs.replace(own, customDomainVerified=False)


class Serving:
    """Serves releases on this host.

    `find_app` returns the record of an app by its id or name. `builds`: whether this worker also builds. `runs_here`
    tells whether this host runs the start commands of a site; without shared storage, it does.
    """

    def __init__(
        self,
        settings: Settings,
        find_app: Callable[[str], Awaitable[App | None]],
        *,
        builds: bool = True,
        runs_here: Callable[[Site], bool] = lambda _: True,
    ) -> None:
        self._builds, self._runs_here = builds, runs_here
        self._settings, self._find_app = settings, find_app
        self._domain = settings.apps_domain.partition(":")[0]
        self._releases = Releases(Path(settings.data_dir))
        self._addresses_lock = asyncio.Lock()

    # -- check, swap, canary ---------------------------------------------------------------------------------

    async def check_health(self, job: Job) -> None:
        site = self._releases.site(job.deploy)
        release = site.release(job.deploy.id)
        if (release / "start").exists():
            if self._runs_here(site):
                await self._check_start_command(job, release)
        elif not (release / "files" / "index.html").is_file():
            raise DeployError("GET / returned 404")

    async def _check_start_command(self, job: Job, release: Path) -> None:
        if (free := read_available_memory()) < MIN_FREE_BYTES:
            logger.error("deploys.no_memory", app=job.app.id, available_mib=free // MIB)
            raise DeployError("this machine has no memory left for another app; stop one, or try again later")
        site = self._releases.site(job.deploy)
        if site.current is not None:
            await self._stop_first(site, site.release(site.current), release, job.deploy.id)
        self.start(job)
        why, ends = "the app was not started; is the `sites` worker running?", time.monotonic() + START_SECONDS
        try:
            while time.monotonic() < ends:
                state = read_state(self._releases.folder, release.name)
                if state.exits:
                    raise DeployError(state.last)
                if state.socket:
                    try:
                        await self._request_root(Path(state.socket), self._host(job))
                    except DeployError as error:
                        why = str(error)
                    else:
                        return
                await asyncio.sleep(POLL_SECONDS)
            raise DeployError(f"the start command did not answer within {START_SECONDS:.0f} seconds: {why}")
        finally:
            self._copy_output(job, release.name)

    def start(self, job: Job) -> None:
        """Starts the start command of a release, if it has one. The watchdog keeps it running."""
        release = self._releases.site(job.deploy).release(job.deploy.id)
        if (release / "start").exists():
            name = host(job.app.name, job.deploy.kind, job.deploy.branch, self._settings.apps_domain)
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

    def _copy_output(self, job: Job, deploy_id: str) -> None:
        path = output_path(self._releases.folder, deploy_id)
        if path.exists():
            for line in path.read_text(errors="replace").splitlines()[-OUTPUT_LINES:]:
                job.write_line(line)

    async def swap(self, job: Job) -> None:
        site = self._releases.site(job.deploy)
        async with self._addresses_lock:
            # Another account may have taken the app's name since the deploy began.
            app = await self._find_app(job.app.id)
            if app is None or app.account != job.app.account:
                raise DeployError("the app was deleted, or now belongs to another account")
            hosts = self._hosts(job.app, site.variant)
            for name in hosts:
                if await self._is_another_app_s(name, job.app, site):
                    raise DeployError(f"the address {name} belongs to another app; rename one of the two")
            site.swap(job.deploy.id, canary=job.deploy.kind == "live")
            for name in hosts:
                self._releases.serve_as(name, site)
            site.release_requests()

    async def _is_another_app_s(self, name: str, app: App, site: Site) -> bool:
        """Returns whether another app is served at the host name, or has it as its own name."""
        served = self._releases.site_at(name)
        if served is not None and served.app_id != app.id:
            owner = await self._find_app(served.app_id)
            if owner is not None and owner.account == served.account and name in self._hosts(owner, served.variant):
                return True
        namesake = await self._find_app(name.partition(".")[0]) if site.is_preview else None
        return namesake is not None and namesake.id != app.id

    async def wait_for_server(self) -> None:
        """Waits for this host's Caddy. It starts after this process, or after its host has caught up."""
        ends, socket = time.monotonic() + SERVER_SECONDS, caddy.canary_socket(self._releases.folder)
        while not await caddy.is_listening(socket) and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    async def watch_canary(self, job: Job) -> None:
        await self.wait_for_server()
        ends = time.monotonic() + self._settings.canary
        while True:
            await self.probe(job)
            if (left := ends - time.monotonic()) <= 0:
                self._releases.site(job.deploy).confirm(job.deploy.id)
                return
            await asyncio.sleep(min(self.canary_pause, left))

    @property
    def canary_pause(self) -> float:
        """Seconds between requests of a canary."""
        return min(1.0, self._settings.canary / 10)

    async def probe(self, job: Job) -> None:
        """Raises DeployError unless Caddy answers for the app, and the start command keeps running."""
        if caddy.read_process(self._releases.folder) is None:
            raise DeployError("no process serves the apps; is the `sites` worker running?")
        await self._request_root(caddy.canary_socket(self._releases.folder), self._host(job))
        if exits := read_state(self._releases.folder, job.deploy.id).exits:
            self._copy_output(job, job.deploy.id)
            raise DeployError(f"the start command exited {exits} time{'' if exits == 1 else 's'}")

    async def _request_root(self, socket: Path, host_name: str) -> None:
        """Requests `/` at the socket. Raises DeployError unless the status is 2xx or 3xx."""
        try:
            with caddy.connectable(socket) as path:
                async with (
                    aiohttp.ClientSession(timeout=REQUEST_TIMEOUT, connector=aiohttp.UnixConnector(path)) as client,
                    client.get("http://localhost/", headers={"Host": host_name}, allow_redirects=False) as answer,
                ):
                    status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            raise DeployError("GET / timed out" if late else "GET / got no answer") from None
        if not 200 <= status < 400:
            raise DeployError(f"GET / returned {status}")

    # -- afterwards ------------------------------------------------------------------------------------------

    async def remove_replaced(self, job: Job) -> None:
        site = self._releases.site(job.deploy)
        replaced = [path.name for path in site.releases() if path.name != site.current]
        if any((self._releases.running / name).is_symlink() for name in replaced):
            await asyncio.sleep(DRAIN_SECONDS)
        for name in replaced:
            self._releases.stop(name)
        await run_in_thread(site.prune)

    async def undo(self, deploy: Deploy) -> None:
        site = self._releases.site(deploy)
        if site.account == deploy.account:
            await self._serve_replaced(site, deploy.id, host(deploy.app, deploy.kind, deploy.branch, self._domain))
        self._releases.stop(deploy.id)
        await run_in_thread(remove_folder, site.release(deploy.id))
        await run_in_thread(remove_folder, self._releases.builds / deploy.id)

    async def _serve_replaced(self, site: Site, deploy_id: str, host_name: str) -> None:
        """Serves the release that the deploy replaced. If it has a start command, wait until that answers."""
        replaced = site.find_stopped(deploy_id) or site.find_replaced(deploy_id)
        if replaced is not None and (replaced / "start").exists() and self._runs_here(site):
            await self._stop_first(site, site.release(deploy_id), replaced, deploy_id)
            self._releases.run(replaced)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETURN_SECONDS):
                    await self._until_it_answers(replaced, host_name)
        undone = site.undo(deploy_id)
        site.release_requests()
        if undone:
            await asyncio.sleep(DRAIN_SECONDS)

    async def _until_it_answers(self, release: Path, host_name: str) -> None:
        while True:
            state = read_state(self._releases.folder, release.name)
            if state.socket:
                with suppress(DeployError):
                    return await self._request_root(Path(state.socket), host_name)
            await asyncio.sleep(POLL_SECONDS)

    async def _undo_abandoned(self, in_progress: Set[str]) -> None:
        """Undoes swaps and canaries whose builder was killed."""
        for site in self._releases.sites():
            if (deploy_id := site.unfinished) is not None and deploy_id not in in_progress:
                await self._undo_canary(site, deploy_id)

    async def _undo_canary(self, site: Site, deploy_id: str) -> None:
        logger.warning("deploys.canary_abandoned", app=site.app_id, deploy=deploy_id)
        await self._serve_replaced(site, deploy_id, f"{site.app_id}.{self._domain}")

    async def undo_overdue(self) -> NoReturn:
        """Undoes releases whose canaries should have ended long ago, because no live builder watches them."""
        since: dict[str, float] = {}
        while True:
            now, sites = time.monotonic(), {site.unfinished: site for site in self._releases.sites()}
            since = {deploy_id: since.get(deploy_id, now) for deploy_id in sites if deploy_id is not None}
            for deploy_id, began in since.items():
                if now - began > self._settings.canary + OVERDUE_SECONDS:
                    try:
                        await self._undo_canary(sites[deploy_id], deploy_id)
                    except (OSError, DeployError) as error:  # such as a full disk; the next round tries again
                        logger.error("deploys.canary_left", deploy=deploy_id, error=str(error))
            await asyncio.sleep(OVERDUE_SECONDS / 4)

    async def tidy(self, in_progress: Set[str]) -> None:
        await self._undo_abandoned(in_progress)
        apps = await self._tidy_addresses()
        await run_in_thread(self._releases.tidy, apps, in_progress, builds=self._builds)

    async def _tidy_addresses(self) -> Set[str]:
        """Serves each app at its present addresses. Returns the ids of the existing apps."""
        async with self._addresses_lock:
            apps: dict[str, App | None] = {}
            unread: set[str] = set()
            addresses: dict[str, Site] = {}
            # Live sites come last and win, because an app's name may equal the host name of another app's preview.
            for site in sorted(self._releases.sites(), key=lambda site: (site.variant == "live", site.app_id)):
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
                    addresses |= dict.fromkeys(self._hosts(app, site.variant), site)
            for name, site in addresses.items():
                self._releases.serve_as(name, site)
            if not unread:
                self._releases.serve_only(addresses)
        return unread | {app_id for app_id, app in apps.items() if app is not None}

    async def follow_changes(self, store: Store) -> NoReturn:
        """Serves an app at its present addresses as soon as its record changes: its name, its domain, its account.

        What is announced while there is no subscription, `tidy` finds.
        """
        changed, woken = set[str](), asyncio.Event()

        def note(_: str, key: str) -> None:
            prefix, _, name = key.partition(":")
            if prefix == APP:
                changed.add(name)
                woken.set()

        def go_on() -> None: ...

        listener = Listener(
            store,
            CHANGES_CHANNEL,
            on_subscribe=go_on,
            on_message=note,
            on_loss=go_on,
            loss_event="sites.changes_lost",
        )
        async with run_in_background(listener.run()):
            while True:
                end_if_canceled()
                await woken.wait()
                woken.clear()
                while changed:
                    name = changed.pop()
                    try:
                        await self._follow_app(name)
                    except Exception as error:  # a damaged record or a full disk must not affect the other apps
                        logger.error("sites.app_not_followed", app=name, exc_info=error)

    async def _follow_app(self, name: str) -> None:
        """Serves the app with this name, and one that had it before, at their present addresses."""
        async with self._addresses_lock:
            app = await self._find_app(name)
            ids = {app.id} if app is not None else set[str]()
            if former := self._releases.site_at(host(name, "live", None, self._domain)):
                ids.add(former.app_id)
            for app_id in ids:
                await self._serve_app(app_id)

    async def _serve_app(self, app_id: str) -> None:
        """Serves the app at its present addresses only, and at none if it is gone."""
        app, hosts = await self._find_app(app_id), dict[str, Site]()
        for site in self._releases.sites_of(app_id):
            if app is not None and site.account == app.account and site.current is not None:
                hosts |= dict.fromkeys(self._hosts(app, site.variant), site)
        for name, site in hosts.items():
            if app is not None and not await self._is_another_app_s(name, app, site):
                self._releases.serve_as(name, site)
        await run_in_thread(self._releases.serve_only, hosts, app_id)

    # -- names -----------------------------------------------------------------------------------------------

    def _host(self, job: Job) -> str:
        return host(job.app.name, job.deploy.kind, job.deploy.branch, self._domain)

    def _hosts(self, app: App, variant: str) -> list[str]:
        if variant != "live":
            branch = variant.removeprefix("p-") if variant.startswith("p-") else None
            return [host(app.name, "preview", branch, self._domain)]
        custom = [app.customDomain] if app.customDomain and app.customDomainVerified else []
        custom = [
            name for name in custom if not name.endswith(f".{self._domain}")
        ]  # such a name may belong to another app
        return [host(app.name, "live", None, self._domain), *custom]


def _may_overlap(*releases: Path) -> bool:
    """Returns whether the releases may run at the same time, on the same data."""
    manifests = [read_release_manifest(release) for release in releases if (release / "start").exists()]
    return len(manifests) < len(releases) or all(each is None or each.overlap for each in manifests)


async def run_in_thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Runs the work in a thread, and waits for its end even if canceled, because the next step relies on its end."""
    return await finish_despite_cancellation(asyncio.to_thread(work, *args, **kwargs))
