"""The data of apps in the cluster: their volumes, and the containers `data` of their pods as processes of this machine."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from gateway.cancellation import RunningTasks
from gateway.keys import app_key
from gateway.redis.client import Store
from tests.fakes.cluster import ADDRESSES
from tests.support.data_rooms import ClusterRoom, data_room
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.sandbox import ROOT
from workers.engine.app_data import GONE_SECONDS, AppData
from workers.engine.data_keeper import Handover
from workers.engine.names import follow_changes
from workers.engine.packing import DataError
from workers.engine.replacements import Replacements
from workers.kubernetes.data import ClusterData
from workers.kubernetes.data_client import DataClient
from workers.kubernetes.data_pod import NONCE, PROOF, keep_data, sign
from workers.kubernetes.objects import claim_name, describe_gone, gone_name
from workers.kubernetes.pod import DATA_PORT
from workers.kubernetes.volume import prepare_volume
from workers.sandbox import tools


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers of data start no program of the host to see which versions it has."""
    monkeypatch.setattr(tools, "find_node", lambda *_: None)
    monkeypatch.setattr(tools, "find_versions", lambda *_: [])


@pytest_asyncio.fixture
async def room(store: Store, without_tools: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClusterRoom]:
    with passable_folder() as folder:
        async with data_room("pod", folder, store, monkeypatch) as room:
            assert isinstance(room, ClusterRoom)
            yield room


async def test_a_new_volume_begins_with_the_newest_snapshot(room: ClusterRoom) -> None:
    """As does one of an app that comes from another engine. Until then no app runs on it."""
    app = await room.create_app()
    room.write(app, note="one")
    name = claim_name(app.id, app.account)
    await room.cluster.delete(("Deployment", f"{name}-live"))
    await room.snapshot(app)
    await wait_until(lambda: not room.cluster.select("Pod"))
    assert not room.cluster.select("Deployment"), "a pod was started for the app that does not run"
    await room.stop()
    await room.cluster.delete(("PersistentVolumeClaim", name))
    await room.cluster.claim(app.id, app.account)
    assert (room.data(app).is_held, room.read(app)) == (True, {})
    room.start()
    await wait_until(lambda: not room.data(app).is_held, 20)
    assert room.read(app) == {"note": "one"}
    assert Replacements(room.data(app)).changes == []


async def test_an_app_that_is_deleted_during_a_round_keeps_a_last_snapshot(
    room: ClusterRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, read_apps, begun = await room.create_app(), room.registry.read_intact_apps, asyncio.Event()
    room.write(app, note="one")
    await room.snapshot(app)

    async def read_later(app_ids: Sequence[str]) -> Any:
        """Finds the app deleted, after the round has begun."""
        if not begun.is_set():
            begun.set()
            await room.commands.forget_app(app, room.records)
            await room.registry.delete_app(app)
        return await read_apps(app_ids)

    monkeypatch.setattr(room.registry, "read_intact_apps", read_later)
    last, *_ = await wait_until(lambda: room.list_deleted(app), 20, holds=lambda found: len(found) == 2)
    assert await room.unpack("shop", last) == {"note": b"one"}
    await wait_until(lambda: not room.cluster.select("PersistentVolumeClaim"), 20)


async def test_a_volume_is_removed_as_soon_as_its_app_is_deleted(room: ClusterRoom) -> None:
    """Where it has data, their command removes it, after the last snapshot."""
    app = await room.create_app()
    data = room.make_driver()
    assert isinstance(data, ClusterData)
    await data.follow_app(app.id)
    assert room.cluster.select("PersistentVolumeClaim"), "the app is there"
    following = asyncio.create_task(follow_changes(room.registry.store, data.follow_app))
    await asyncio.sleep(0.2)
    await room.stop()
    await room.registry.delete_app(app)
    await wait_until(lambda: not room.cluster.select("PersistentVolumeClaim"), 5)
    assert not room.cluster.select("Secret")
    following.cancel()
    await asyncio.wait([following])


async def test_a_volume_stays_for_a_week_when_the_records_of_its_app_are_lost(room: ClusterRoom) -> None:
    app = await room.create_app()
    room.write(app, note="one")
    name = claim_name(app.id, app.account)
    record = await room.registry.store.client.get(app_key(app.name))
    await room.registry.store.client.delete(app_key(app.name))
    room.registry.cache.forget(app_key(app.name))
    mark = ("Secret", gone_name(name))
    await wait_until(lambda: mark in room.cluster.present, 20)
    await asyncio.sleep(0.5)
    assert room.read(app) == {"note": "one"}
    await room.registry.store.client.set(app_key(app.name), record)
    room.registry.cache.forget(app_key(app.name))
    await wait_until(lambda: mark not in room.cluster.present, 20)
    await room.registry.store.client.delete(app_key(app.name))
    room.registry.cache.forget(app_key(app.name))
    claim = room.cluster.present["PersistentVolumeClaim", name]
    await room.cluster.apply(describe_gone(claim, time.time() - GONE_SECONDS - 1))
    await wait_until(lambda: not room.cluster.select("PersistentVolumeClaim"), 20)


# -- many apps -----------------------------------------------------------------------------------------------


async def test_a_round_asks_a_part_of_the_apps(room: ClusterRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a new volume does not wait behind thousands of them."""
    monkeypatch.setattr("workers.kubernetes.data.REPORTED", 2)
    await room.stop()
    apps = [await room.create_app(name) for name in ("shop", "notes", "wiki")]
    driver = room.make_driver()
    first, second = await driver.find_changes(), await driver.find_changes()
    assert (len(first), len(second)) == (2, 1)
    assert first.keys() | second.keys() == {(app.account, app.id) for app in apps}
    assert await driver.find_changes() == {}
    # Apps that sleep take nobody's place in a round: a larger plan reaches the pods of the others as soon as before.
    read_apps, asked = room.registry.read_intact_apps, list[str]()

    async def read(app_ids: Sequence[str]) -> Any:
        asked.extend(app_ids)
        return await read_apps(app_ids)

    for app in apps[:2]:
        await room.cluster.delete(("Deployment", f"{claim_name(app.id, app.account)}-live"))
    monkeypatch.setattr(room.cluster, "is_asleep", lambda *_: True)
    monkeypatch.setattr("workers.kubernetes.data.REPORTED", 1)
    monkeypatch.setattr(room.registry, "read_intact_apps", read)
    driver = room.make_driver()
    for _ in range(5):
        await driver.find_changes()
    assert {*asked[:3]} == {"shop", "notes", "wiki"}
    assert asked[3:] == ["wiki", "wiki"]


async def test_a_volume_without_a_pod_is_looked_at_again_when_it_has_one(
    room: ClusterRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await room.create_app()
    await room.stop()
    name, select, looks = claim_name(app.id, app.account), room.cluster.select, list[str]()
    labels = room.cluster.present["Deployment", f"{name}-live"].metadata.labels
    await room.cluster.delete(("Deployment", f"{name}-live"))  # the app sleeps

    def count(kind: str, **labels: str) -> list[Any]:
        looks.append(kind)
        return select(kind, **labels)

    running, driver = RunningTasks(), room.make_driver()
    [(_, begin)] = driver.list_rounds(running)
    monkeypatch.setattr(room.cluster, "select", count)
    for _ in range(3):
        await begin()
    assert (looks, running) == (["Pod"], {})
    await room.cluster.start_pod(f"{name}-live", labels)
    await begin()
    assert looks == ["Pod", "Pod"]
    await asyncio.gather(*running.values())
    await begin()
    assert looks == ["Pod", "Pod"], "the app may run on it"


TOKEN = "t" * 32


class Volume:
    def __init__(self, folder: Path) -> None:
        self.data, self.folder, self.ip = AppData(folder, "shop"), folder, next(ADDRESSES)
        self.pod = DataClient(self.ip, TOKEN, folder / "packed.tar.gz")

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.data.files / name).write_text(text)

    def read(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.data.files.iterdir()}


async def unpack(handover: Handover) -> dict[str, str]:
    """Returns the files that are handed over."""
    async with handover as packed:
        assert packed is not None
        with tarfile.open(packed.archive) as tar:
            return {each.name: tar.extractfile(each).read().decode() for each in tar}  # type: ignore[union-attr]


@pytest.fixture
async def volume(without_tools: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Volume]:
    with passable_folder() as folder:
        (folder / "scratch").mkdir()
        (folder / "token").write_text(TOKEN)
        volume = Volume(folder)
        keeping = asyncio.create_task(
            keep_data(volume.data, folder / "token", scratch=folder / "scratch", host=volume.ip)
        )
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(DataError):
                    await volume.pod.report(10 << 20)
                    break
                assert not keeping.done(), keeping.exception()
                await asyncio.sleep(0.05)
        try:
            yield volume
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def test_a_new_worker_ends_what_the_one_before_has_begun(volume: Volume) -> None:
    await volume.pod.begin("")
    volume.write(a="first")

    async def clear_slowly() -> None:
        async with volume.pod.clear("dat_1"):
            assert volume.data.is_held
            assert await unpack(volume.pod.clear("dat_2")) == {"a": "first"}
            volume.write(b="second")

    with pytest.raises(DataError):
        await clear_slowly()
    assert volume.read() == {"b": "second"}
    assert Replacements(volume.data).changes == ["dat_2"]
    assert not volume.data.is_held


async def test_only_the_worker_is_answered(volume: Volume) -> None:
    for token in ("", "wrong"):
        headers = {"Authorization": token and sign(token, "1", "/undo"), NONCE: "1"}
        async with aiohttp.ClientSession(f"http://{volume.ip}:{DATA_PORT}", headers=headers) as client:
            for method, path in (("GET", "/snapshot"), ("GET", "/restore"), ("POST", "/undo")):
                async with client.request(method, path) as answer:
                    assert answer.status == 401
    (volume.folder / "token").write_text("another one")  # the service's key was replaced
    with pytest.raises(DataError):
        await volume.pod.report()


class Impostor:
    """An app that has taken the port of its container `data`."""

    def __init__(self, how: str) -> None:
        self.how, self.ip = how, next(ADDRESSES)
        self.asked: list[str] = []  # headers, and what was asked elsewhere

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[DataClient]:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        try:
            for ip, port in ((self.ip, DATA_PORT), (self.ip, DATA_PORT + 1)):
                await web.TCPSite(runner, ip, port).start()
            with passable_folder() as folder:
                yield DataClient(self.ip, TOKEN, folder / "packed.tar.gz")
        finally:
            await runner.cleanup()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(str(request.headers))
        if request.url.port != DATA_PORT:
            self.asked.append("elsewhere")
        if self.how == "redirects":
            raise web.HTTPFound(f"http://{self.ip}:{DATA_PORT + 1}/internal")
        if self.how == "repeats the signature":
            return web.json_response({}, headers={PROOF: request.headers["Authorization"]})
        if self.how == "answers for ever":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(bytes(1 << 20))
        if self.how == "takes the socket":
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            await socket.send_str("0" * 64)
            await socket.receive()
            return socket
        return web.Response(status=409, text="x" * 10_000_000)


@pytest.mark.parametrize(
    "how", ["redirects", "repeats the signature", "answers for ever", "takes the socket", "gives a long reason"]
)
async def test_an_app_that_takes_the_port_is_not_believed(how: str) -> None:
    impostor = Impostor(how)
    async with impostor.listening() as pod, asyncio.timeout(20):
        with pytest.raises(DataError, match="did not answer") as error:
            await pod.report()
        assert len(str(error.value)) < 1_000
        with pytest.raises(DataError, match="did not answer"):
            await unpack(pod.snapshot())
    assert "elsewhere" not in impostor.asked
    assert not any(TOKEN in headers for headers in impostor.asked)


async def test_a_start_command_ends_before_its_files_are_replaced(volume: Volume) -> None:
    """It holds the lock while it runs, as the keeper does, and ends when it is told to."""
    volume.write(a="first")
    await volume.pod.begin("")
    program = (
        "import sys, time; from pathlib import Path; from workers.engine.app_data import AppData;"
        "from workers.kubernetes.volume import wait_for_data;"
        f"data = AppData(Path({str(volume.folder)!r}), 'shop'); lock = wait_for_data(data); print('runs', flush=True);"
        "[time.sleep(0.01) for _ in iter(lambda: data.is_held, True)]; (data.files / 'last').write_text('words')"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "runs\n"
    assert await unpack(volume.pod.clear("dat_1")) == {"a": "first", "last": "words"}
    assert await asyncio.to_thread(process.wait, 10) == 0
    process.stdout.close()
    assert not volume.data.is_held


@pytest.fixture
def data(tmp_path: Path) -> AppData:
    """The data on a volume that a pod of the app has prepared."""
    data = AppData(tmp_path, "shop", stop_seconds=1.0)
    prepare_volume(data)
    data.unmark_stale()
    return data


def test_a_pod_that_starts_brings_back_files_that_were_being_replaced(data: AppData) -> None:
    (data.files / "a").write_text("first")
    data.files.rename(data.folder / "former")
    data.hold()
    prepare_volume(data)
    assert (data.files / "a").read_text() == "first"
    assert not data.is_held


def test_a_pod_that_starts_leaves_the_files_to_another_one(data: AppData) -> None:
    """Which replaces them, or runs the app: then it does not even wait."""
    with data.stopped():
        prepare_volume(data)
        assert data.is_held
    began = time.monotonic()
    with data.running("", 1):
        prepare_volume(data)
    assert time.monotonic() - began < data.stop_seconds


def test_a_container_that_starts_again_ends_the_hold_that_it_has_left(data: AppData) -> None:
    """The app has noticed the hold, and is about to end."""
    app = data.running("", 1)
    app.__enter__()
    data.hold()
    threading.Timer(0.3, app.__exit__, (None, None, None)).start()
    prepare_volume(data)
    assert not data.is_held


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Runs the block as another user of the volume's group."""
    os.setegid(1_000_000)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.skipif(not ROOT, reason="the container `data` and the first one have different users")
def test_files_that_were_replaced_belong_to_another_container() -> None:
    first, own = 1_000_000, 1_000_001
    with passable_folder() as folder:
        data = AppData(folder, "shop")
        data.folder.mkdir(parents=True)
        os.chown(data.folder, -1, first)  # as `fsGroup` does
        data.folder.chmod(0o2775)
        with as_user(first):
            prepare_volume(data)
        with as_user(own):
            data.files.rename(data.folder / "former")
            data.files.mkdir()
            prepare_volume(data)
        with as_user(first):
            prepare_volume(data)
            with data.stopped():
                assert data.is_held
        assert [path.stat().st_mode & 0o777 for path in (data.files, data.folder / "lock")] == [0o770, 0o660]
