"""The engines that serve apps, as one contract drives them (`tests/workers/engine/test_driver_contract.py`).

Each engine is a worker that follows the serving records in Redis, what it works on, and visitors. A host has real
files, and a fake Caddy and watchdog. A cluster has a fake API server, over HTTP. A worker can die after any call of its
driver, and the next one has only what the first one has left.
"""

import asyncio
import contextlib
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
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
from gateway.settings import Settings
from gateway.storage import open_storage
from tests.fakes.cluster import FakeCluster
from tests.fakes.host import FakeHost
from tests.fakes.start_commands import StartCommands
from tests.support.background import cancel
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from workers.engine.driver import Driver
from workers.engine.reconciler import Reconciler
from workers.engine.steps import ReleaseSteps
from workers.hosting.archives import archive_key
from workers.hosting.driver import HostDriver
from workers.hosting.sleep_limits import SleepLimits
from workers.hosting.suspensions import Suspensions
from workers.kubernetes import activator
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.driver import ClusterDriver
from workers.kubernetes.sleep import Sleep

DOMAIN = "apps.test"
LOOK_SECONDS = 0.02  # between looks at the suspended apps
DATA_BYTES = 1 << 28
# Short times, so that no test waits long.
QUICK: dict[str, float] = {
    "gateway.storage.LONGEST_PAUSE_SECONDS": 0.2,
    "workers.engine.reconciler.POLL_SECONDS": 0.02,
    "workers.engine.reconciler.QUICK_POLL_SECONDS": 0.02,
    "workers.engine.reconciler.TIDY_SECONDS": 0.2,
    "workers.hosting.driver.POLL_SECONDS": 0.02,
    "workers.engine.steps.DRAIN_SECONDS": 0.1,
    "workers.hosting.suspensions.POLL_SECONDS": LOOK_SECONDS,
    "workers.kubernetes.driver.POLL_SECONDS": 0.02,
    "workers.kubernetes.driver.ACTIVATOR_SECONDS": 0.1,
    "workers.kubernetes.sleep.ACTIVATOR_SECONDS": 0.1,
    "workers.kubernetes.cluster.FIRST_PAUSE_SECONDS": 0.05,
    "workers.kubernetes.cluster.LONGEST_PAUSE_SECONDS": 0.2,
}


class Mortal:
    """A driver whose worker dies right after one of its calls, and which takes its time between them."""

    def __init__(self, driver: Driver, engine: "Engine") -> None:
        self._driver, self._engine = driver, engine

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        return self._dying(name, found) if asyncio.iscoroutinefunction(found) else found

    def _dying(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def make(*args: Any) -> Any:
            await asyncio.sleep(self._engine.pause)
            found = await call(*args)
            if name == self._engine.dies_after:
                self._engine.died.set()
                await asyncio.Event().wait()
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
        self.dies_after, self.died, self.pause = "", asyncio.Event(), 0.0
        self._working: list[asyncio.Task[Any]] = []
        self._stack = contextlib.AsyncExitStack()

    def _make_settings(self) -> Settings:
        return Settings(
            data_dir=str(self.folder), apps_domain=DOMAIN, storage_url=f"file://{self._storage_folder}", canary=0.1
        )

    async def find_app(self, name: str) -> App | None:
        return next((app for app in self.apps if name in (app.id, app.name)), None)

    # -- the worker ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts a worker, which applies the records before it follows them."""
        raise NotImplementedError

    async def _follow(self, driver: Driver) -> None:
        steps = ReleaseSteps(cast("Driver", Mortal(driver, self)), self.find_app, DOMAIN)
        reconciler = Reconciler(Records(self.store), steps, self.find_app, self.settings.canary)
        self._stack.push_async_callback(reconciler.aclose)
        await reconciler.catch_up()
        self._work(reconciler.run())

    def _work(self, part: Any) -> None:
        self._working.append(asyncio.create_task(part))

    async def stop(self) -> None:
        await cancel(*self._working)
        self._working.clear()
        await self._stack.aclose()
        self.dies_after = ""

    async def aclose(self) -> None:
        await self.stop()

    # -- what it works on ------------------------------------------------------------------------------------

    async def store_release(self, app: App, deploy: str, *, runs: bool, overlap: bool, page: bool) -> Release:
        """Makes a release, and stores its archive. Without a `page`, nothing is to be served."""
        manifest = msgspec.json.encode(Manifest(build=ManifestBuild(start="serve" if runs else None, overlap=overlap)))
        files = {"manifest.json": manifest} | ({"start": b"serve", "app/name": deploy.encode()} if runs else {})
        files |= {"files/index.html": deploy.encode()} if page and not runs else {}
        archive = _pack(files)
        await open_storage(self.settings).put(archive_key(app.id, deploy), archive)
        if not page:
            self.commands.failing.add(deploy)
        return Release(hashlib.sha256(archive).hexdigest(), len(archive), runs, manifest=manifest.decode())

    async def lose_release(self, app: App, deploy: str) -> None:
        await open_storage(self.settings).delete([archive_key(app.id, deploy)])

    async def visit(self, host: str) -> tuple[int, str]:
        """Returns what a visitor gets: the status, and the name of the deploy. Raises OSError and EOFError."""
        raise NotImplementedError

    def list_kept(self) -> set[str]:
        """Returns the deploys of which something is left."""
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
        driver = HostDriver(self.settings, suspensions.mark)
        await driver.open()
        self._work(suspensions.run())
        await self._follow(driver)

    async def visit(self, host: str) -> tuple[int, str]:
        return await self.host.visit(host)

    def list_kept(self) -> set[str]:
        running = {path.name.partition(".")[0] for path in self.host.releases.running.iterdir()}
        return running | {path.name for site in self.host.releases.sites() for path in site.releases()}

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
        self.cluster = FakeCluster(self.commands)
        self._sleep: Sleep | None = None

    def _make_settings(self) -> Settings:
        return msgspec.structs.replace(super()._make_settings(), apps_engine="kubernetes")

    async def start(self) -> None:
        cluster = await self._stack.enter_async_context(Cluster("apps"))
        suspended = SuspendedList(self.store)
        driver = ClusterDriver(
            self.settings, cluster, self.find_app, suspended, _ignore_crash, _find_limit, "127.0.0.1"
        )
        self._stack.push_async_callback(driver.aclose)
        self._sleep = await self._stack.enter_async_context(contextlib.aclosing(Sleep(cluster, driver, suspended)))
        self._work(cluster.run())
        await cluster.until_synced()
        await suspended.read_changes()
        self._work(every(LOOK_SECONDS, self._sleep.follow_suspensions, "sites.suspensions_not_marked"))
        self._work(activator.Activator(self._sleep, cast("SleepLimits", StayAwake())).run())
        await self._follow(driver)

    async def aclose(self) -> None:
        await super().aclose()
        await self.cluster.aclose()

    async def visit(self, host: str) -> tuple[int, str]:
        return await self.cluster.visit(host)

    def list_kept(self) -> set[str]:
        labels = [each["metadata"]["labels"] for (kind, _), each in self.cluster.objects.items() if kind != "endpoints"]
        return {each[DEPLOY_LABEL] for each in labels if DEPLOY_LABEL in each}

    async def let_sleep(self, deploy: str) -> None:
        assert self._sleep is not None
        [address] = [address for address in self._sleep.list_awake() if address[1] == "live"]
        await self._sleep.let_sleep(address, 0.0)
        await wait_until(lambda: deploy not in self.commands.running)

    def outage(self) -> contextlib.AbstractContextManager[None]:
        return self.cluster.outage()


class StayAwake:
    async def find(self, _: str) -> None:
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
            port = free_port()
            for module in ("places", "activator"):
                monkeypatch.setattr(f"workers.kubernetes.{module}.ACTIVATOR_PORT", port)
            monkeypatch.setenv("KUBECONFIG", str(await cluster.cluster.start(folder)))
        stack.push_async_callback(engine.aclose)
        yield engine


def _pack(files: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


async def _ignore_crash(*_: object) -> None:
    """Reports no crash."""


async def _find_limit(_: str) -> int:
    return DATA_BYTES
