"""Where the data of apps are, as one contract works on them (`tests/workers/engine/test_data.py`).

A host has folders and a real sandbox. A cluster has claims, and pods whose container `data` is real and is reached over
HTTP. Both have the agent that carries out the commands, and a real storage and Redis.
"""

import asyncio
import contextlib
import io
import os
import shutil
import tarfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.data.commands import DataAnswer, DataCommands
from gateway.data.records import DataRecords, DataStatus, Snapshot, snapshot_key
from gateway.deploys.pod_log import APP_CONTAINER, DEPLOY_LABEL
from gateway.redis.client import Store
from gateway.settings import Settings
from gateway.storage import open_storage
from tests.fakes.cluster import ADDRESSES
from tests.support.background import cancel
from tests.support.polling import wait_until
from tests.support.sandbox import checked_sandbox
from workers.engine.app_data import AppData
from workers.engine.data import DataAgent, DataDriver
from workers.engine.packing import DataError
from workers.hosting.data import HostData
from workers.hosting.releases import Releases
from workers.kubernetes.data import ClusterData
from workers.kubernetes.data_client import DataClient
from workers.kubernetes.data_pod import keep_data
from workers.kubernetes.objects import ACCOUNT_LABEL, APP_LABEL, DATA_CONTAINER, DATA_LABEL, claim_name

USERS = range(61_192, 61_196)
TOKEN = "t" * 32
QUICK = {
    "workers.engine.data.POLL_SECONDS": 0.05,
    "workers.engine.data.REPEAT_SECONDS": 0.1,
    "workers.engine.data.TIDY_SECONDS": 0.1,
    "workers.hosting.data.REPORT_SECONDS": 0.05,
    "workers.hosting.data.PLANS_SECONDS": 0.1,
    "workers.kubernetes.data.BEGIN_SECONDS": 0.05,
    "workers.kubernetes.data.LISTEN_POLL_SECONDS": 0.05,
    "workers.kubernetes.data.REPORT_SECONDS": 0.1,
    "workers.kubernetes.data_pod.MEASURE_SECONDS": 0.1,
}


class DataRoom:
    """An agent, and accounts with an app each."""

    trusted = False  # whether the sandbox is the container

    def __init__(self, folder: Path, store: Store, storage_url: str = "") -> None:
        self.folder, self.store = folder, store
        limits = {"free": 1, "starter": 2, "maker": 4, "max": 8}
        self.settings = Settings(data_dir=str(folder), app_data=limits, storage_url=storage_url)
        self.registry = Registry(store, Vault(""))
        self.records, self.commands = DataRecords(store), DataCommands(store)
        self.storage = open_storage(self.settings)
        self.sandbox = checked_sandbox(USERS, folder, development=self.trusted, trusted=self.trusted)
        self._task: asyncio.Task[None] | None = None

    def make_driver(self) -> DataDriver:
        raise NotImplementedError

    def data(self, app: App) -> AppData:
        raise NotImplementedError

    async def open(self, app: App) -> AppData:
        """Makes the folder of an app's data, as its first start does."""
        raise NotImplementedError

    async def aclose(self) -> None:
        await self.stop()

    def start(self) -> None:
        self._task = asyncio.create_task(DataAgent(self.registry, self.make_driver()).run())

    async def stop(self) -> None:
        """Stops the agent, wherever it is."""
        if self._task is not None:
            await cancel(self._task)
            self._task = None

    # -- apps ------------------------------------------------------------------------------------------------

    async def create_app(self, app_id: str = "shop", plan: Any = "max", account: str = "") -> App:
        """Makes an app of the account, or of a new one."""
        owner = account or (await self.registry.create_account("A", plan))[0].id
        app = App(id=app_id, name=app_id, account=owner, createdAt="")
        await self.registry.put_app(app, None)
        await self.open(app)
        return app

    def write(self, app: App, **files: str) -> AppData:
        """Writes files as the app."""
        data = self.data(app)
        for name, text in files.items():
            (data.files / name).write_text(text)
            os.chown(data.files / name, data.files.stat().st_uid, -1)
        return data

    def read(self, app: App) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.data(app).files.iterdir()}

    async def run(self, app: App, action: Any, **more: str) -> DataAnswer:
        return await self.commands.run(app.account, app.id, action, 30, **more)  # type: ignore[arg-type]

    # -- snapshots -------------------------------------------------------------------------------------------

    async def snapshot(self, app: App, **more: str) -> Snapshot:
        answer = await self.run(app, "snapshot", **more)
        assert answer.snapshot is not None, answer
        return answer.snapshot

    async def unpack(self, app_id: str, snapshot: Snapshot | None) -> dict[str, bytes]:
        """Returns the files of a snapshot."""
        assert snapshot is not None
        found = await self.storage.open(snapshot_key(app_id, snapshot.id))
        assert found is not None
        content = b"".join([chunk async for chunk in found.chunks])
        assert len(content) == snapshot.bytes == found.size
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            return {each.name: tar.extractfile(each).read() for each in tar if each.isfile()}  # type: ignore[union-attr]

    async def list_stored(self, app_id: str) -> set[str]:
        return {name.partition(".")[0] for name in await self.storage.list_names(f"data/{app_id}/snapshots/")}

    async def list_snapshots(self, app: App) -> list[Snapshot]:
        return await self.records.list_snapshots(app.account, app.id)

    async def list_deleted(self, app: App) -> list[Snapshot]:
        return [snapshot for each in await self.records.list_deleted(app.account) for snapshot in each.snapshots]

    async def status(self, app: App) -> DataStatus:
        return await self.records.read_status(app)


class HostRoom(DataRoom):
    def __init__(self, folder: Path, store: Store, storage_url: str = "") -> None:
        super().__init__(folder, store, storage_url)
        Releases(folder).create_folders()

    def make_driver(self) -> HostData:
        return HostData(self.settings, self.registry, self.sandbox)

    def data(self, app: App) -> AppData:
        return AppData(self.folder, app.id)

    async def open(self, app: App) -> AppData:
        data = self.data(app)
        with data.running(app.account, 8 << 20), data.user(self.sandbox):
            return data


class ClusterRoom(DataRoom):
    trusted = True

    def __init__(self, folder: Path, store: Store, storage_url: str = "") -> None:
        super().__init__(folder, store, storage_url)
        self.cluster = Volumes(folder)

    def make_driver(self) -> ClusterData:
        return ClusterData(self.settings, self.registry, self.cluster, self.cluster)  # type: ignore[arg-type]

    def data(self, app: App) -> AppData:
        return self.cluster.data(app.id, app.account)

    async def open(self, app: App) -> AppData:
        await self.cluster.claim(app.id, app.account)
        self.data(app).unmark_stale()
        return self.data(app)

    async def aclose(self) -> None:
        await super().aclose()
        await self.cluster.aclose()


class Volumes:
    """Of a cluster and its driver, what has to do with the data of apps: claims, their volumes and pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.present: dict[tuple[str, str], Any] = {}
        self.followers = defaultdict[str, list[Callable[[Any], None]]](list)
        self._pods: dict[str, asyncio.Task[None]] = {}  # by claim

    def data(self, app_id: str, account: str) -> AppData:
        return AppData(self.folder / claim_name(app_id, account), app_id)

    async def claim(self, app_id: str, account: str) -> None:
        """Makes a claim and its volume, and a pod in which the app runs."""
        name = claim_name(app_id, account)
        labels = {APP_LABEL: app_id, ACCOUNT_LABEL: account, DATA_LABEL: name}
        self._note("PersistentVolumeClaim", name, labels)
        await self.start_pod(f"{name}-live", {**labels, DEPLOY_LABEL: "dep_0"})

    async def start_pod(self, name: str, labels: dict[str, str]) -> None:
        self._note("Deployment", name, labels)
        data, ip = self.data(labels[APP_LABEL], labels[ACCOUNT_LABEL]), next(ADDRESSES)
        top = data.folder.parents[1]
        (scratch := top / f"scratch-{name}").mkdir(parents=True, exist_ok=True)
        (top / "token").write_text(TOKEN)
        self._pods[name] = asyncio.create_task(keep_data(data, top / "token", scratch=scratch, host=ip))
        await wait_until(lambda: _answers(DataClient(ip, TOKEN, scratch)), 20, every=0.1)
        running = SimpleNamespace(running=True)
        containers = [SimpleNamespace(name=part, ready=True, state=running) for part in (DATA_CONTAINER, APP_CONTAINER)]
        self._note("Pod", name, labels, SimpleNamespace(podIP=ip, containerStatuses=containers))

    def _note(self, kind: str, name: str, labels: dict[str, str], status: Any = None) -> None:
        head = SimpleNamespace(name=name, uid=name, labels=labels, deletionTimestamp=None, creationTimestamp="")
        self.present[kind, name] = found = SimpleNamespace(metadata=head, status=status)
        for follow in self.followers[kind]:
            follow(found)

    def select(self, kind: str, **labels: str) -> list[Any]:
        wanted = {f"capsule/{name}": value for name, value in labels.items()}
        found = [each for (own, _), each in self.present.items() if own == kind]
        return [each for each in found if wanted.items() <= each.metadata.labels.items()]

    async def apply(self, described: Any) -> None:
        kind, head = described["kind"], described["metadata"]
        if kind == "Deployment":
            await self.start_pod(head["name"], head["labels"])
        else:
            self._note(kind, head["name"], head["labels"])

    async def delete(self, *keys: tuple[str, str]) -> None:
        for kind, name in keys:
            found = self.present.pop((kind, name), None)
            if kind == "Deployment" and found is not None:
                del self.present["Pod", name]
                await cancel(self._pods.pop(name))
            elif kind == "PersistentVolumeClaim" and found is not None:
                labels = found.metadata.labels
                shutil.rmtree(self.data(labels[APP_LABEL], labels[ACCOUNT_LABEL]).folder)

    async def until(self, look: Callable[[], Any], seconds: float) -> Any:
        return await wait_until(look, seconds, every=0.02)

    async def aclose(self) -> None:
        await cancel(*self._pods.values())

    def data_token(self, *_: str) -> str:
        return TOKEN

    async def apply_claim(self, *_: object) -> None:
        """Leaves the claim as it is."""

    @property
    def places(self) -> Any:
        return self

    def is_asleep(self, *_: str) -> bool:
        return False


async def _answers(pod: DataClient) -> bool:
    with contextlib.suppress(DataError):
        await pod.report()
        return True
    return False


@contextlib.asynccontextmanager
async def data_room(kind: str, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DataRoom]:
    """Yields a room whose agent runs."""
    for name, value in QUICK.items():
        monkeypatch.setattr(name, value)
    room = (HostRoom if kind == "host" else ClusterRoom)(folder, store)
    room.start()
    try:
        yield room
    finally:
        await room.aclose()
