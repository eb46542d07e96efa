"""The engines that serve apps, as one contract drives them (`tests/workers/engine/test_driver_contract.py`).

Each engine is a worker that follows the serving records in Redis, what it works on, and visitors. A host has real
files, and a fake Caddy and watchdog. A cluster has a fake API server, over HTTP. A worker can die after any call of its
driver, and the next one has only what the first one has left.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from gateway.accounts.records import App
from gateway.accounts.suspended import SuspendedList
from gateway.deploys.manifest import Manifest, ManifestBuild
from gateway.deploys.pod_log import DEPLOY_LABEL
from gateway.deploys.release import Release
from gateway.deploys.serving import Records
from gateway.loops import every
from gateway.redis.client import Store
from gateway.settings import Plan, Settings
from gateway.storage import open_storage
from tests.fakes.cluster import FakeCluster
from tests.fakes.host import FakeHost
from tests.fakes.start_commands import StartCommands
from tests.support.background import cancel
from tests.support.deployment import packed
from tests.support.kubeconfig import write_kubeconfig
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from workers.engine.driver import Driver
from workers.engine.reconciler import NEXT_STEP_SECONDS, RESYNC_SECONDS, Reconciler
from workers.engine.steps import ReleaseSteps
from workers.hosting.archives import archive_key
from workers.hosting.driver import START_SECONDS, HostDriver
from workers.hosting.releases import Site, remove_folder
from workers.hosting.sleep_limits import SleepLimits
from workers.hosting.suspensions import Suspensions
from workers.kubernetes.activator import Activator
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.driver import ClusterDriver
from workers.kubernetes.sleep import Sleep
from workers.kubernetes.startup import PLACE_SECONDS

DOMAIN = "apps.test"
LOOK_SECONDS = 0.1  # between looks at the suspended apps
POLL_SECONDS, ACTIVATOR_SECONDS, TIDY_SECONDS = 0.05, 0.1, 0.2
# Short times, so that no test waits long.
QUICK: dict[str, float] = {
    "gateway.storage.LONGEST_PAUSE_SECONDS": 0.2,
    "workers.hosting.suspensions.POLL_SECONDS": LOOK_SECONDS,
    "workers.engine.health.ELSEWHERE_SECONDS": 0.2,
}


async def nothing_happens(_: str) -> None:
    """What an engine is made with as `after`."""


class Watched:
    """A driver that takes its time between its calls. After each of them, something may happen to its engine."""

    def __init__(self, driver: Driver, engine: "Engine") -> None:
        self._driver, self._engine = driver, engine

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        return self._watch(name, found) if asyncio.iscoroutinefunction(found) else found

    def _watch(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def make(*args: Any) -> Any:
            await asyncio.sleep(self._engine.pause)
            found = await call(*args)
            await self._engine.after(name)
            return found

        return make


class Engine:
    """A worker, the apps that it serves, and their visitors."""

    holds_requests = False  # whether requests that wait for an app wait at the worker

    def __init__(self, folder: Path, store: Store) -> None:
        """`store` is the worker's. The apps are what `find_app` finds."""
        self.commands, self.store, self.apps = StartCommands(), store, list[App]()
        self.folder, self._storage_folder = folder, folder / "storage"
        self._storage_folder.mkdir()
        self.settings = self._make_settings()
        # The times of the worker that starts next.
        self.start_seconds, self.place_seconds, self.drain_seconds = START_SECONDS, PLACE_SECONDS, 0.1
        self.resync_seconds, self.next_step_seconds = RESYNC_SECONDS, NEXT_STEP_SECONDS
        self.pause = 0.0  # seconds, before each call of the applier
        self.after: Callable[[str], Awaitable[None]] = nothing_happens  # gets the name of each call
        self._working: list[asyncio.Task[Any]] = []
        self._stack = contextlib.AsyncExitStack()

    def _make_settings(self) -> Settings:
        return Settings(
            data_dir=str(self.folder),
            apps_domain=f"{DOMAIN}:8080",  # names lead to apps without the port
            storage_url=f"file://{self._storage_folder}",
            canary=0.1,
        )

    async def find_app(self, name: str) -> App | None:
        return next((app for app in self.apps if name in (app.id, app.name)), None)

    async def find_apps(self, app_ids: Sequence[str]) -> dict[str, App]:
        return {app.id: app for app in self.apps if app.id in app_ids}

    # -- the worker ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts a worker, which applies the records before it follows them."""
        raise NotImplementedError

    async def _follow(self, driver: Driver) -> None:
        watched = cast("Driver", Watched(driver, self))
        steps = ReleaseSteps(watched, self.find_app, self.find_apps, self.settings, drain_seconds=self.drain_seconds)
        reconciler = Reconciler(
            Records(self.store),
            steps,
            self.find_app,
            self.settings.canary,
            poll_seconds=POLL_SECONDS,
            resync_seconds=self.resync_seconds,
            tidy_seconds=TIDY_SECONDS,
            next_step_seconds=self.next_step_seconds,
        )
        self._stack.push_async_callback(reconciler.aclose)
        await reconciler.catch_up()
        self._work(reconciler.run())

    def _work(self, part: Any) -> None:
        self._working.append(asyncio.create_task(part))

    async def stop(self) -> None:
        await cancel(*self._working)
        self._working.clear()
        await self._stack.aclose()
        self.after = nothing_happens

    # -- what it works on ------------------------------------------------------------------------------------

    async def store_release(
        self, app: App, deploy: str, *, runs: bool, overlap: bool, page: bool, health: str
    ) -> Release:
        """Makes a release, and stores its archive. Without a `page`, nothing is to be served."""
        build = ManifestBuild(start="serve" if runs else None, overlap=overlap)
        manifest = msgspec.json.encode(Manifest(build=build)).decode()
        files = {"manifest.json": manifest} | ({"start": "serve", "app/name": deploy} if runs else {})
        files |= {"files/index.html": deploy} if page and not runs else {}
        archive = packed(files)
        await open_storage(self.settings).put(archive_key(app.id, deploy), archive)
        if not page:
            self.commands.failing.add(deploy)
        digest = hashlib.sha256(archive).hexdigest()
        return Release(digest, len(archive), runs, manifest=manifest, health=health)

    async def lose_release(self, app: App, deploy: str) -> None:
        await open_storage(self.settings).delete([archive_key(app.id, deploy)])

    def damage_release(self, app: App, deploy: str) -> Callable[[], object]:
        """Stores another archive in its place, which is as long. Returns what repairs it."""
        file = self._storage_folder / archive_key(app.id, deploy)
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + b"?")
        return lambda: file.write_bytes(whole)

    def lose_everything(self) -> None:
        """Removes all that serves the apps, while no worker runs."""
        raise NotImplementedError

    async def visit(self, host: str) -> tuple[int, str]:
        """Returns what a visitor gets: the status, and the name of the deploy. Raises OSError and EOFError."""
        raise NotImplementedError

    def list_kept(self) -> set[str]:
        """Returns the deploys of which something is left."""
        raise NotImplementedError

    def is_holding(self) -> bool:
        """Returns whether requests for an app that does not run still wait, as while its releases change."""
        raise NotImplementedError

    async def let_sleep(self, deploy: str) -> None:
        """Lets the app's live release sleep."""
        raise NotImplementedError

    def outage(self) -> contextlib.AbstractContextManager[None]:
        """What the engine works with does not answer: the storage, or the API server. Visitors get answers."""
        raise NotImplementedError


class HostEngine(Engine):
    def __init__(self, folder: Path, store: Store) -> None:
        super().__init__(folder, store)
        self.host = FakeHost(folder, self.commands)

    async def start(self) -> None:
        suspensions = Suspensions(self.store, self.host.releases)
        await suspensions.catch_up()
        driver = HostDriver(
            self.settings, suspensions.mark, start_seconds=self.start_seconds, poll_seconds=POLL_SECONDS
        )
        await driver.open()
        self._work(suspensions.run())
        await self._follow(driver)

    def lose_everything(self) -> None:
        releases = self.host.releases
        for deploy in releases.releases_to_run():
            releases.stop(deploy)
        for site in [*releases.sites()]:
            remove_folder(site.folder.parent)
        for site, names in releases.list_names().items():
            releases.serve_no_more(Site(site), names)

    async def visit(self, host: str) -> tuple[int, str]:
        return await self.host.visit(host)

    def list_kept(self) -> set[str]:
        running = {path.name.partition(".")[0] for path in self.host.releases.running.iterdir()}
        return running | {path.name for site in self.host.releases.sites() for path in site.releases()}

    def is_holding(self) -> bool:
        return any(site.read_link("held") for site in self.host.releases.sites())

    async def let_sleep(self, deploy: str) -> None:
        await self.host.let_sleep(deploy)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        away = self._storage_folder.with_name("away")
        self._storage_folder.rename(away)
        try:
            yield
        finally:
            away.rename(self._storage_folder)


class ClusterEngine(Engine):
    holds_requests = True

    def __init__(self, folder: Path, store: Store) -> None:
        super().__init__(folder, store)
        self.cluster, self._port = FakeCluster(self.commands), free_port()  # of each worker's activator
        self._sleep: Sleep | None = None
        self._driver: ClusterDriver | None = None
        self.plan: Plan = "max"  # of each account

    async def find_plan(self, _: str) -> Plan:
        return self.plan

    def _make_settings(self) -> Settings:
        return msgspec.structs.replace(
            super()._make_settings(), apps_engine="kubernetes", app_pods={"free": 2, "max": 100}
        )

    async def start(self) -> None:
        cluster = await self._stack.enter_async_context(
            Cluster("apps", first_pause_seconds=0.05, longest_pause_seconds=0.2)
        )
        suspended = SuspendedList(self.store)
        self._driver = driver = ClusterDriver(
            self.settings,
            cluster,
            self.find_app,
            suspended,
            _ignore_crash,
            self.find_plan,
            ("127.0.0.1", self._port),
            place_seconds=self.place_seconds,
            start_seconds=self.start_seconds,
            poll_seconds=POLL_SECONDS,
            activator_seconds=ACTIVATOR_SECONDS,
        )
        self._stack.push_async_callback(driver.aclose)
        self._sleep = await self._stack.enter_async_context(contextlib.aclosing(Sleep(cluster, driver, suspended)))
        self._work(cluster.run())
        await cluster.until_synced()
        await suspended.read_changes()
        self._work(every(LOOK_SECONDS, self._sleep.follow_suspensions, "sites.suspensions_not_marked"))
        self._work(Activator(self._sleep, cast("SleepLimits", StayAwake()), port=self._port).run())
        await self._follow(driver)

    def lose_everything(self) -> None:
        self.cluster.clear()

    async def visit(self, host: str) -> tuple[int, str]:
        return await self.cluster.visit(host)

    def list_kept(self) -> set[str]:
        labels = [each["metadata"]["labels"] for (kind, _), each in self.cluster.objects.items() if kind != "endpoints"]
        return {each[DEPLOY_LABEL] for each in labels if DEPLOY_LABEL in each}

    def is_holding(self) -> bool:
        assert self._driver is not None
        return bool(self._driver.states)

    async def let_sleep(self, deploy: str) -> None:
        assert self._sleep is not None
        assert self._driver is not None
        records = self._driver.records
        [address] = [each for each in records if self._sleep.may_sleep(each) and records[each].serves == deploy]
        await self._sleep.let_sleep(address, 0.0)
        await wait_until(lambda: deploy not in self.commands.running)

    async def read_visits(self) -> set[str]:
        """Returns the addresses of the previews that were visited since the last call."""
        assert self._driver is not None
        return {address for _, _, address in await self._driver.read_visits()}

    def outage(self) -> contextlib.AbstractContextManager[None]:
        return self.cluster.outage()


class StayAwake:
    async def read(self, *_: str) -> None:
        """No plan says that apps sleep."""

    def find_known(self, _: str, *, is_preview: bool) -> None:
        """Finds no limit for any app."""


@contextlib.asynccontextmanager
async def engine_on(kind: str, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """Yields an engine, whose worker the test starts."""
    for name, value in QUICK.items():
        monkeypatch.setattr(name, value)
    async with contextlib.AsyncExitStack() as stack:
        if kind == "host":
            engine: Engine = (own := HostEngine(folder, store))
            await stack.enter_async_context(own.host)
        else:
            engine = (cluster := ClusterEngine(folder, store))
            port = await stack.enter_async_context(cluster.cluster.running())
            monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(folder, port)))
        stack.push_async_callback(engine.stop)
        yield engine


async def _ignore_crash(*_: object) -> None:
    """Reports no crash."""
