"""What makes a deploy. The worker (`builder.py`) knows the states; an engine knows the machines.

`LocalEngine` builds and serves on this machine: source → build command → release → health check → swap → canary.
Each step that visitors can see is one rename. So a worker may be killed at any time, and the next one undoes what it
left. To build or serve on several machines, run an outside engine, which uses the operators' API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import aiohttp
import msgspec
import structlog

from gateway.accounts.records import App, Build
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.cancellation import finish_despite_cancellation
from gateway.deploys.states import Deploy, host
from gateway.settings import Settings
from workers.deploys import build, source
from workers.deploys.source import DeployError
from workers.sandbox.output import concealer
from workers.sandbox.sandbox import BUILD_USERS, MIB, Limits, Sandbox, Unsafe
from workers.sites import disk, sites, web
from workers.sites.environment import write_environment
from workers.sites.releases import Releases, Site, exclusive_lock, remove_folder
from workers.sites.watchdog import output_path

logger = structlog.get_logger()

P = ParamSpec("P")
R = TypeVar("R")

START_SECONDS = 60.0  # within which a start command must answer
REUSE_SECONDS = 60.0  # within which the files of a release are linked
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=10)
POLL_INTERVAL = 0.2  # seconds
DRAIN = 2.0  # seconds for requests in progress, between a swap or its undoing and the end of the replaced release
RETURN_SECONDS = 10.0  # within which an app that is served again should answer
OUTPUT_LINES = 100  # of a start command, copied to the log


class Job(msgspec.Struct, frozen=True):
    deploy: Deploy
    app: App
    write_line: Callable[[str], None]  # to the deploy's log
    record_commit: Callable[[str], Awaitable[None]]


class Engine(Protocol):
    """Every step raises `DeployError`, and every step may be cancelled."""

    def open(self) -> AbstractAsyncContextManager[str]:
        """Waits until no other worker uses the data folder; yields the folder's id."""

    async def build(self, job: Job) -> None:
        """Makes the deploy's release, of its source or of an earlier release."""

    async def check_health(self, job: Job) -> None:
        """Checks the release before visitors see it."""

    async def swap(self, job: Job) -> None:
        """Serves the release to visitors."""

    async def watch_canary(self, job: Job) -> None:
        """Checks the release while visitors see it."""

    async def finish(self, job: Job) -> None:
        """The deploy is live: stops and prunes the releases that it replaced."""

    async def undo(self, deploy: Deploy) -> None:
        """Removes what is left of the deploy and serves what it replaced. Can be repeated safely."""

    async def tidy(self, in_progress: Set[str]) -> None:
        """Runs regularly. `in_progress`: ids of deploys to leave alone; the set changes while this runs."""


class LocalEngine:
    """`find_ai_url` returns the address of managed inference for an app's builds, or None while inference is off.

    `find_variables` returns an app's environment variables. It raises NoEncryptionKey.
    """

    def __init__(
        self,
        settings: Settings,
        find_app: Callable[[str], Awaitable[App | None]],
        find_ai_url: Callable[[App], Awaitable[str | None]],
        find_variables: Callable[[App], Awaitable[dict[str, str]]],
        limits: Limits = build.LIMITS,
    ) -> None:
        self._settings, self._find_app, self._find_ai_url = settings, find_app, find_ai_url
        self._find_variables = find_variables
        self._vault = Vault(settings.encryption_key)
        self._limits = limits
        self._domain = settings.apps_domain.partition(":")[0]
        self._releases = Releases(Path(settings.data_dir))
        self._sandbox = Sandbox(development=settings.allow_private_addresses, users=BUILD_USERS)
        self._addresses_lock = asyncio.Lock()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        self._releases.create_folders()
        try:
            await _run_in_thread(source.check_git, self._sandbox.environment["PATH"])
        except DeployError as error:
            logger.error("deploys.no_repositories", action=str(error))
        async with exclusive_lock(self._releases.folder / "deploys.lock"):
            yield self._releases.folder_id()

    # -- build -----------------------------------------------------------------------------------------------

    async def build(self, job: Job) -> None:
        if job.deploy.release is None:
            await self._build(job)
        else:
            await self._reuse(job, job.deploy.release)

    async def _reuse(self, job: Job, former: str) -> None:
        """Links the files of a release into a new one. Files of releases never change, so both can share them."""
        await _run_in_thread(self._releases.claim_folder, job.deploy)
        found = await _run_in_thread(self._releases.find_release, job.app.id, former)
        if found is None:
            raise DeployError(f"the release of {former} is no longer kept; deploy its source again")
        job.write_line(f"Using the release of {former}; nothing is built")
        release = self._releases.site(job.deploy).release(job.deploy.id)
        await _run_in_thread(remove_folder, release)  # left by a worker that was stopped
        # As a process of its own, which no depth of folders can stop and which leaves the event loop free.
        copying = await asyncio.create_subprocess_exec("cp", "-al", "--", str(found), str(release))
        try:
            status = await asyncio.wait_for(copying.wait(), REUSE_SECONDS)
        except BaseException:
            copying.kill()
            await finish_despite_cancellation(copying.wait())
            raise
        if status:
            raise DeployError(f"the release of {former} could not be read; deploy its source again")
        if (release / "start").exists():
            write_environment(release, await self._open_variables(job.app), self._vault)
        await _run_in_thread(self._bound_disk, job.deploy, release)

    async def _open_variables(self, app: App) -> dict[str, str]:
        """Raises DeployError."""
        try:
            return await self._find_variables(app)
        except NoEncryptionKey as error:
            logger.error("deploys.sealed", app=app.id, error=str(error))
            raise DeployError("an environment variable can't be decrypted; set it again") from None

    async def _build(self, job: Job) -> None:
        deploy, spec = job.deploy, job.app.build or Build(output=".")
        try:
            self._sandbox.check(self._releases.builds)
        except Unsafe as error:
            logger.error("deploys.unsafe", action=str(error))
            raise DeployError(
                "this machine can't build apps safely yet; the worker's log tells its operator why"
            ) from None
        variables = await self._open_variables(job.app)
        conceal, write_line = concealer(variables), job.write_line
        job = msgspec.structs.replace(job, write_line=lambda line: write_line(conceal(line)))
        folder = self._releases.builds / deploy.id
        await _run_in_thread(self._releases.claim_folder, deploy)
        with self._sandbox.reserve_user() as uid:
            folder.mkdir(mode=0o711)  # the worker owns it; the build owns what is inside
            try:
                await self._fetch_source(job, uid, folder)
                if spec.command:
                    ai_url = await self._find_ai_url(job.app)
                    await build.build(
                        self._sandbox, uid, folder, spec.command, ai_url, job.write_line, self._limits, variables
                    )
                release, runs = self._releases.site(deploy).release(deploy.id), spec.start is not None
                output = "." if runs else spec.output
                await _run_in_thread(build.collect_output, folder / "source", output, release, uid, runs=runs)
                if spec.start is not None:
                    write_environment(release, variables, self._vault)
                    (release / "start").write_text(spec.start)
                await _run_in_thread(self._bound_disk, deploy, release)
            finally:
                await _run_in_thread(remove_folder, folder)

    def _bound_disk(self, deploy: Deploy, release: Path) -> None:
        limit = self._settings.account_disk
        if not disk.make_room(self._releases, deploy.account, release, limit * MIB):
            remove_folder(release)
            raise DeployError(f"the account's apps take more than {limit} MiB of disk; make them smaller")

    async def _fetch_source(self, job: Job, uid: int | None, folder: Path) -> None:
        deploy, settings = job.deploy, self._settings
        if deploy.source:
            archive = self._releases.folder / "sources" / deploy.appId / f"{deploy.source}.tar.gz"
            await source.unpack(self._sandbox, uid, folder, archive, job.write_line)
            return
        if job.app.repository is None:
            raise DeployError("the app no longer has a repository; connect one, or publish its source")
        branch = deploy.branch or job.app.repository.branch
        job.write_line(f"Cloning branch {branch} of {job.app.repository.url}")
        try:
            url = job.app.repository.clone_url(self._vault)
        except NoEncryptionKey as error:
            logger.error("deploys.sealed", app=job.app.id, error=str(error))
            raise DeployError("the repository's password can't be decrypted; connect the repository again") from None
        commit = await source.clone(
            self._sandbox,
            uid,
            folder,
            url,
            branch,
            job.write_line,
            tenant=job.app.account,
            allow_private=settings.allow_private_addresses,
            ca_file=settings.ca_file,
        )
        job.write_line(f"Commit {commit}")
        await job.record_commit(commit)

    # -- check, swap, canary ---------------------------------------------------------------------------------

    async def check_health(self, job: Job) -> None:
        release = self._releases.site(job.deploy).release(job.deploy.id)
        if (release / "start").exists():
            await self._check_start_command(job, release)
            return
        async with web.serve_release(release) as port:
            await self._request_root(f"127.0.0.1:{port}", self._host(job))

    async def _check_start_command(self, job: Job, release: Path) -> None:
        self._releases.run(release)
        why, ends = "the app was not started; is the `sites` worker running?", time.monotonic() + START_SECONDS
        try:
            while time.monotonic() < ends:
                state = web.read_state(self._releases.folder, release.name)
                if state.exits:
                    raise DeployError(state.last)
                if state.socket:
                    try:
                        await self._request_root("localhost", self._host(job), state.socket)
                    except DeployError as error:
                        why = str(error)
                    else:
                        return
                await asyncio.sleep(POLL_INTERVAL)
            raise DeployError(f"the start command did not answer within {START_SECONDS:.0f} seconds: {why}")
        finally:
            self._copy_output(job, release.name)

    def _copy_output(self, job: Job, deploy_id: str) -> None:
        path = output_path(self._releases.folder, deploy_id)
        if path.exists():
            for line in path.read_text(errors="replace").splitlines()[-OUTPUT_LINES:]:
                job.write_line(line)

    async def swap(self, job: Job) -> None:
        site = self._releases.site(job.deploy)
        async with self._addresses_lock:
            hosts = self._hosts(job.app, site.variant)
            if site.variant != "live":
                owner = await self._find_app(hosts[0].partition(".")[0])
                if owner is not None and owner.id != job.app.id:
                    raise DeployError(f"the address {hosts[0]} belongs to another app; rename one of the two")
            site.swap(job.deploy.id, canary=job.deploy.kind == "live")
            for name in hosts:
                self._releases.serve_as(name, site)

    async def watch_canary(self, job: Job) -> None:
        ends = time.monotonic() + self._settings.canary
        while True:
            if not (address := sites.read_address(self._releases.folder)):
                raise DeployError("no process serves the apps; is the `sites` worker running?")
            await self._request_root(address, self._host(job))
            if exits := web.read_state(self._releases.folder, job.deploy.id).exits:
                self._copy_output(job, job.deploy.id)
                raise DeployError(f"the start command exited {exits} time{'' if exits == 1 else 's'}")
            if (left := ends - time.monotonic()) <= 0:
                self._releases.site(job.deploy).confirm(job.deploy.id)
                return
            await asyncio.sleep(min(1.0, self._settings.canary / 10, left))

    async def _request_root(self, address: str, host_name: str, socket: str = "") -> None:
        """Raises DeployError unless GET / is answered with 2xx or 3xx."""
        headers, url = {"Host": host_name}, f"http://{address}/"
        connector = aiohttp.UnixConnector(socket) if socket else None
        try:
            async with (
                aiohttp.ClientSession(timeout=REQUEST_TIMEOUT, connector=connector) as client,
                client.get(url, headers=headers, allow_redirects=False) as answer,
            ):
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            raise DeployError(f"GET / was not answered{' in time' if late else ''}") from None
        if not 200 <= status < 400:
            raise DeployError(f"GET / was answered with {status}")

    # -- afterwards ------------------------------------------------------------------------------------------

    async def finish(self, job: Job) -> None:
        site = self._releases.site(job.deploy)
        replaced = [path.name for path in site.releases() if path.name != site.current]
        if any((self._releases.running / name).is_symlink() for name in replaced):
            await asyncio.sleep(DRAIN)
        for name in replaced:
            self._releases.stop(name)
        await _run_in_thread(site.prune)

    async def undo(self, deploy: Deploy) -> None:
        site = self._releases.site(deploy)
        if site.account == deploy.account:
            await self._serve_replaced(site, deploy.id, host(deploy.app, deploy.kind, deploy.branch, self._domain))
        self._releases.stop(deploy.id)
        await _run_in_thread(remove_folder, site.release(deploy.id))
        await _run_in_thread(remove_folder, self._releases.builds / deploy.id)

    async def _serve_replaced(self, site: Site, deploy_id: str, host_name: str) -> None:
        """Serves again what the deploy replaced. If that is an app, it first has to answer."""
        replaced = site.replaced_by(deploy_id)
        if replaced is not None and (replaced / "start").exists():
            self._releases.run(replaced)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETURN_SECONDS):
                    await self._until_it_answers(replaced, host_name)
        if site.undo(deploy_id):
            await asyncio.sleep(DRAIN)

    async def _until_it_answers(self, release: Path, host_name: str) -> None:
        while True:
            state = web.read_state(self._releases.folder, release.name)
            if state.socket:
                with suppress(DeployError):
                    return await self._request_root("localhost", host_name, state.socket)
            await asyncio.sleep(POLL_INTERVAL)

    async def _undo_abandoned(self, in_progress: Set[str]) -> None:
        """A builder that was killed in a canary leaves a release that nobody watches."""
        for site in self._releases.sites():
            if (deploy_id := site.unverified) is not None and deploy_id not in in_progress:
                logger.warning("deploys.canary_abandoned", app=site.app_id, deploy=deploy_id)
                await self._serve_replaced(site, deploy_id, f"{site.app_id}.{self._domain}")

    async def tidy(self, in_progress: Set[str]) -> None:
        await self._undo_abandoned(in_progress)
        apps = await self._tidy_addresses()
        await _run_in_thread(self._releases.tidy, apps, in_progress)

    async def _tidy_addresses(self) -> Set[str]:
        """Serves each app at its present addresses. Returns the ids of the apps that exist."""
        async with self._addresses_lock:
            apps: dict[str, App | None] = {}
            unread: set[str] = set()
            addresses: dict[str, Site] = {}
            # Live sites come last and win, because an app's name may equal the host name of another app's preview.
            for site in sorted(self._releases.sites(), key=lambda site: (site.variant == "live", site.app_id)):
                if site.app_id not in apps:
                    try:
                        apps[site.app_id] = await self._find_app(site.app_id)
                    except msgspec.MsgspecError as error:  # one damaged record does not stop the others
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


async def _run_in_thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Waits for the thread even when cancelled: a thread can't be cancelled, and the next step relies on its end."""
    return await finish_despite_cancellation(asyncio.to_thread(work, *args, **kwargs))
