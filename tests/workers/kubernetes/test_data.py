"""The data of apps in the cluster: their volumes, and the containers `data` of their pods, as processes here."""

import asyncio
import contextlib
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from gateway.accounts.records import App
from gateway.keys import app_key
from gateway.redis.client import Store
from tests.fakes.cluster import ADDRESSES
from tests.support.data_rooms import TOKEN, ClusterRoom, data_room
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from workers.engine.app_data import GONE_SECONDS, AppData
from workers.engine.data_keeper import Handover
from workers.engine.packing import DataError
from workers.engine.replacements import Replacements
from workers.kubernetes.data_client import DataClient
from workers.kubernetes.data_pod import NONCE, PROOF, sign
from workers.kubernetes.objects import claim_name, describe_gone, gone_name
from workers.kubernetes.pod import DATA_PORT
from workers.kubernetes.volume import prepare_volume
from workers.sandbox import tools


@pytest_asyncio.fixture
async def room(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClusterRoom]:
    """Its keepers of data start no program of the host to see which versions it has."""
    monkeypatch.setattr(tools, "find_node", lambda *_: None)
    monkeypatch.setattr(tools, "find_versions", lambda *_: [])
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


async def unpack(handover: Handover) -> dict[str, str]:
    """Returns the files that are handed over."""
    async with handover as packed:
        assert packed is not None
        with tarfile.open(packed.archive) as tar:
            return {each.name: tar.extractfile(each).read().decode() for each in tar}  # type: ignore[union-attr]


async def open_pod(room: ClusterRoom) -> tuple[App, DataClient]:
    """Makes an app, whose pod no worker asks."""
    app = await room.create_app()
    await room.stop()
    [pod] = room.cluster.select("Pod")
    return app, DataClient(pod.status.podIP, TOKEN, room.folder / "packed.tar.gz")


async def test_a_new_worker_ends_what_the_one_before_has_begun(room: ClusterRoom) -> None:
    app, pod = await open_pod(room)
    data = room.write(app, a="first")

    async def clear_slowly() -> None:
        async with pod.clear("dat_1"):
            assert data.is_held
            assert await unpack(pod.clear("dat_2")) == {"a": "first"}
            room.write(app, b="second")

    with pytest.raises(DataError):
        await clear_slowly()
    assert room.read(app) == {"b": "second"}
    assert Replacements(data).changes == ["dat_2"]
    assert not data.is_held


async def test_only_the_worker_is_answered(room: ClusterRoom) -> None:
    app, pod = await open_pod(room)
    [found] = room.cluster.select("Pod")
    for token in ("", "wrong"):
        headers = {"Authorization": token and sign(token, "1", "/undo"), NONCE: "1"}
        async with aiohttp.ClientSession(f"http://{found.status.podIP}:{DATA_PORT}", headers=headers) as client:
            for method, path in (("GET", "/snapshot"), ("GET", "/restore"), ("POST", "/undo")):
                async with client.request(method, path) as answer:
                    assert answer.status == 401
    (room.data(app).folder.parents[1] / "token").write_text("another one")  # the service's key was replaced
    with pytest.raises(DataError):
        await pod.report()


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
            for ip, port in ((self.ip, DATA_PORT), (self.ip, DATA_PORT + 10)):
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
            raise web.HTTPFound(f"http://{self.ip}:{DATA_PORT + 10}/internal")
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


async def test_a_start_command_ends_before_its_files_are_replaced(room: ClusterRoom) -> None:
    """It holds the lock while it runs, as the keeper does, and ends when it is told to."""
    app, pod = await open_pod(room)
    data = room.write(app, a="first")
    folder = str(data.folder.parents[1])
    program = (
        "import sys, time; from pathlib import Path; from workers.engine.app_data import AppData;"
        "from workers.kubernetes.volume import wait_for_data;"
        f"data = AppData(Path({folder!r}), 'shop'); lock = wait_for_data(data); print('runs', flush=True);"
        "[time.sleep(0.01) for _ in iter(lambda: data.is_held, True)]; (data.files / 'last').write_text('words')"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "runs\n"
    assert await unpack(pod.clear("dat_1")) == {"a": "first", "last": "words"}
    assert await asyncio.to_thread(process.wait, 10) == 0
    process.stdout.close()
    assert not data.is_held


@pytest.fixture
def data(tmp_path: Path) -> AppData:
    """The data on a volume that a pod of the app has prepared."""
    data = AppData(tmp_path, "shop", stop_seconds=1.0)
    prepare_volume(data)
    data.unmark_stale()
    return data


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
    """The app has noticed the hold, and is about to end. Files that were being replaced are brought back."""
    (data.files / "a").write_text("first")
    data.files.rename(data.folder / "former")
    app = data.running("", 1)
    app.__enter__()
    data.hold()
    threading.Timer(0.3, app.__exit__, (None, None, None)).start()
    prepare_volume(data)
    assert (data.files / "a").read_text() == "first"
    assert not data.is_held
