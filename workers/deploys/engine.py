"""What a deploy is made by. The worker (`deploys.py`) knows the states, an engine knows the machines.

`LocalEngine` builds and serves on this one: source → build command → release → check → swap → canary. Each step that
others can see is one rename, so that a worker may be killed at any instant: what it left is undone by the next.
More machines than one are an outside engine's, over the platform surface.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import aiohttp
import msgspec
import structlog

from gateway.accounts.records import App, Build
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.cancellation import undisturbed
from gateway.deploys.states import Deploy, host
from gateway.settings import Settings
from workers.deploys import build, source
from workers.deploys.releases import Releases, Site, alone, remove
from workers.deploys.source import Failed
from workers.sandbox.sandbox import BUILD_USERS, Limits, Sandbox, Unsafe
from workers.sites import sites, web
from workers.sites.watchdog import output_path

logger = structlog.get_logger()

P = ParamSpec("P")
R = TypeVar("R")

START_SECONDS = 60.0  # until a start command must answer
ANSWER = aiohttp.ClientTimeout(total=10)
DRAIN = 2.0  # seconds between a swap, or its undoing, and the end of what is served no more


class Job(msgspec.Struct, frozen=True):
    deploy: Deploy
    app: App
    tell: Callable[[str], None]  # a line of the deploy's log
    committed: Callable[[str], Awaitable[None]]  # which commit is built


class Engine(Protocol):
    """Every step raises `Failed`. Any of them may be cancelled."""

    def opened(self) -> AbstractAsyncContextManager[str]:
        """What tells the place where it builds from every other."""

    async def build(self, job: Job) -> None: ...

    async def check(self, job: Job) -> None:
        """Before anybody sees it."""

    async def swap(self, job: Job) -> None: ...

    async def canary(self, job: Job) -> None:
        """While everybody sees it."""

    async def settle(self, job: Job) -> None:
        """It is live: what it replaced may go."""

    async def undo(self, deploy: Deploy) -> None:
        """Whatever is left of it goes, and what it replaced is served. Does nothing the second time."""

    async def tidy(self, under_way: Set[str]) -> None:
        """Now and then; `under_way`: the ids of deploys that are not to be disturbed, as they change."""


class LocalEngine:
    """`ai_url` gives an app's builds the address of managed inference, or None while it is off."""

    def __init__(
        self,
        settings: Settings,
        find: Callable[[str], Awaitable[App | None]],
        ai_url: Callable[[App], Awaitable[str | None]],
        limits: Limits = build.LIMITS,
    ) -> None:
        self._settings, self._find, self._ai_url = settings, find, ai_url
        self._vault = Vault(settings.encryption_key)
        self._limits = limits
        self._domain = settings.apps_domain.partition(":")[0]
        self._releases = Releases(Path(settings.data_dir))
        self._sandbox = Sandbox(development=settings.allow_private_addresses, users=BUILD_USERS)
        self._addressing = asyncio.Lock()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        self._releases.open()
        async with alone(self._releases.folder / "deploys.lock"):
            yield self._releases.id()

    # -- build -----------------------------------------------------------------------------------------------

    async def build(self, job: Job) -> None:
        deploy, wanted = job.deploy, job.app.build or Build(output=".")
        try:
            self._sandbox.check(self._releases.builds)
        except Unsafe as error:
            logger.error("deploys.unsafe", action=str(error))
            raise Failed("this machine can't build apps safely yet; its operator finds why in the log") from None
        folder = self._releases.builds / deploy.id
        await _thread(self._releases.claim, deploy)
        with self._sandbox.user() as uid:
            folder.mkdir(mode=0o711)  # ours: only what is in it is the build's
            try:
                await self._fetch(job, uid, folder)
                if wanted.command:
                    ai_url = await self._ai_url(job.app)
                    await build.build(self._sandbox, uid, folder, wanted.command, ai_url, job.tell, self._limits)
                release, runs = self._releases.site(deploy).release(deploy.id), wanted.start is not None
                output = "." if runs else wanted.output
                await _thread(build.collect, folder / "source", output, release, uid, runs=runs)
                if wanted.start is not None:
                    (release / "start").write_text(wanted.start)
            finally:
                await _thread(remove, folder)

    async def _fetch(self, job: Job, uid: int | None, folder: Path) -> None:
        deploy, settings = job.deploy, self._settings
        if deploy.source:
            archive = self._releases.folder / "sources" / deploy.appId / f"{deploy.source}.tar.gz"
            await source.unpack(self._sandbox, uid, folder, archive, job.tell)
            return
        if job.app.repository is None:
            raise Failed("the app has no repository any more; connect one, or publish its source")
        branch = deploy.branch or job.app.repository.branch
        job.tell(f"Cloning {branch} of {job.app.repository.url}")
        try:
            url = job.app.repository.clone_url(self._vault)
        except NoEncryptionKey as error:
            logger.error("deploys.sealed", app=job.app.id, error=str(error))
            raise Failed("the repository's password can't be read; connect the repository anew") from None
        commit = await source.clone(
            self._sandbox,
            uid,
            folder,
            url,
            branch,
            job.tell,
            allow_private=settings.allow_private_addresses,
            ca_file=settings.ca_file,
        )
        job.tell(f"Commit {commit}")
        await job.committed(commit)

    # -- check, swap, canary ---------------------------------------------------------------------------------

    async def check(self, job: Job) -> None:
        release = self._releases.site(job.deploy).release(job.deploy.id)
        if (release / "start").exists():
            await self._check_running(job, release)
            return
        async with web.aside(release) as port:
            await self._ask(f"127.0.0.1:{port}", self._host(job))

    async def _check_running(self, job: Job, release: Path) -> None:
        self._releases.run(release)
        why, ends = "it was not started; is the worker `sites` running?", time.monotonic() + START_SECONDS
        try:
            while time.monotonic() < ends:
                state = web.running(self._releases.folder, release.name)
                if state.exits:
                    raise Failed(state.last)
                if state.port:
                    try:
                        await self._ask(f"127.0.0.1:{state.port}", self._host(job))
                    except Failed as error:
                        why = str(error)
                    else:
                        return
                await asyncio.sleep(0.2)
            raise Failed(f"the start command did not answer within {START_SECONDS:.0f} seconds: {why}")
        finally:
            self._tell_output(job, release.name)

    def _tell_output(self, job: Job, deploy_id: str) -> None:
        path = output_path(self._releases.folder, deploy_id)
        if path.exists():
            for line in path.read_text(errors="replace").splitlines()[-100:]:
                job.tell(line)

    async def swap(self, job: Job) -> None:
        site = self._releases.site(job.deploy)
        async with self._addressing:
            hosts = self._hosts(job.app, site.variant)
            if site.variant != "live":
                taken = await self._find(hosts[0].partition(".")[0])
                if taken is not None and taken.id != job.app.id:
                    raise Failed(f"the address {hosts[0]} is another app's; rename one of the two")
            site.swap(job.deploy.id)
            for name in hosts:
                self._releases.serve_as(name, site)

    async def canary(self, job: Job) -> None:
        ends = time.monotonic() + self._settings.canary
        while True:
            if not (address := sites.address(self._releases.folder)):
                raise Failed("nothing serves the apps; is the worker `sites` running?")
            await self._ask(address, self._host(job))
            if exits := web.running(self._releases.folder, job.deploy.id).exits:
                self._tell_output(job, job.deploy.id)
                raise Failed(f"the start command ended {exits} times")
            if (left := ends - time.monotonic()) <= 0:
                return
            await asyncio.sleep(min(1.0, self._settings.canary / 10, left))

    async def _ask(self, address: str, name: str) -> None:
        """GET / must be answered with 2xx or 3xx."""
        headers, url = {"Host": name}, f"http://{address}/"
        try:
            async with (
                aiohttp.ClientSession(timeout=ANSWER) as client,
                client.get(url, headers=headers, allow_redirects=False) as answer,
            ):
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            raise Failed(f"GET / was not answered{' in time' if late else ''}") from None
        if not 200 <= status < 400:
            raise Failed(f"GET / was answered with {status}")

    # -- afterwards ------------------------------------------------------------------------------------------

    async def settle(self, job: Job) -> None:
        site = self._releases.site(job.deploy)
        replaced = [path.name for path in site.releases() if path.name != site.current]
        if any((self._releases.running / name).is_symlink() for name in replaced):
            await asyncio.sleep(DRAIN)
        for name in replaced:
            self._releases.stop(name)
        await _thread(site.prune)

    async def undo(self, deploy: Deploy) -> None:
        site = self._releases.site(deploy)
        if site.account == deploy.account and site.undo(deploy.id):
            if site.current is not None and (site.release(site.current) / "start").exists():
                self._releases.run(site.release(site.current))
            await asyncio.sleep(DRAIN)
        self._releases.stop(deploy.id)
        await _thread(remove, site.release(deploy.id))
        await _thread(remove, self._releases.builds / deploy.id)

    async def tidy(self, under_way: Set[str]) -> None:
        async with self._addressing:
            apps: dict[str, App | None] = {}
            addresses: dict[str, Site] = {}
            # The live ones last: an app may have the name of another's preview.
            for site in sorted(self._releases.sites(), key=lambda site: site.variant == "live"):
                if site.app_id not in apps:
                    apps[site.app_id] = await self._find(site.app_id)
                app = apps[site.app_id]
                if app is not None and app.account != site.account:
                    app = apps[site.app_id] = None
                if app is not None and site.current is not None:
                    addresses |= dict.fromkeys(self._hosts(app, site.variant), site)
            for name, site in addresses.items():
                self._releases.serve_as(name, site)
            self._releases.serve_no_others(addresses)
        await _thread(self._releases.tidy, [app_id for app_id, app in apps.items() if app is not None], under_way)

    # -- names -----------------------------------------------------------------------------------------------

    def _host(self, job: Job) -> str:
        return host(job.app.name, job.deploy.kind, job.deploy.branch, self._domain)

    def _hosts(self, app: App, variant: str) -> list[str]:
        if variant != "live":
            branch = variant.removeprefix("p-") if variant.startswith("p-") else None
            return [host(app.name, "preview", branch, self._domain)]
        custom = [app.customDomain] if app.customDomain and app.customDomainVerified else []
        custom = [name for name in custom if not name.endswith(f".{self._domain}")]  # it may be another app's own
        return [host(app.name, "live", None, self._domain), *custom]


async def _thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """To its end: a thread can't be cancelled, and what comes after counts on its being over."""
    return await undisturbed(asyncio.to_thread(work, *args, **kwargs))
