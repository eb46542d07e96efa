"""Processes that die are replaced, and their figures leave /metrics and the disk. Here they die in every way."""

import asyncio
import contextlib
import itertools
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest
import uvicorn

from gateway.supervisor import PREFIX, TICK, Child, metrics_folder, remove_gauges
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk
from tests.fakes.server import HANG
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer

session = pytest.mark.asyncio(loop_scope="session")

ANSWERED = r'gateway_requests_total\{code="",format="native",status="200"\}'
KINDS = ("counter", "histogram", "gauge_livesum", "gauge_livemin", "gauge_livemostrecent")
FILES = {"lock", *(f"{kind}_{number}.db" for kind in KINDS for number in (0, 1))}
STARTED = 25  # descriptors that a process has once it serves, and not before


@contextlib.asynccontextmanager
async def running(
    valkey: RedisServer,
    provider: FakeProvider,
    folder: Path,
    constants: Mapping[str, float] = {},
    start: bool = True,
    **settings: str,
) -> AsyncIterator[Gateway]:
    """Two processes under a supervisor."""
    gw = Gateway(valkey.url, provider, folder, constants, **settings)
    gw.workers = 2
    try:
        if start:
            await gw.start()
        yield gw
    finally:
        await gw.stop()
        await gw.http.aclose()
        gw.assert_log_is_clean()
        assert "GET /" not in gw.log  # paths may hold secrets


def temporary(folder: Path) -> Path:
    (folder / "tmp").mkdir(exist_ok=True)
    return folder / "tmp"


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


async def figure(gw: Gateway, name: str) -> float | None:
    response = await gw.http.get("/metrics", headers={"Connection": "close"})
    found = re.search(rf"^{name} (\S+)$", response.text, re.M)
    return float(found[1]) if found else None


def workers(gw: Gateway) -> list[int]:
    """The processes that serve; the supervisor's other child tracks resources."""
    assert gw.process
    pid = gw.process.pid
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may have ended since
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
@session
async def test_a_replaced_process_takes_its_gauges_along(
    provider: FakeProvider, backend: FakeAppBackend, valkey: RedisServer, tmp_path: Path, number: signal.Signals
) -> None:
    """Ten open streams stayed ten after both processes had been killed."""
    async with running(valkey, provider, tmp_path, GATEWAY_DRAIN="1") as gw:
        app = await gw.app(backend)
        prompt = provider.plays(ROLE, chunk("a"), HANG)
        headers = app.headers(Connection="close")
        body = {"prompt": prompt, "stream": True}
        asking = [asyncio.create_task(app.post(body, headers=headers)) for _ in range(10)]

        async def streams(expected: float) -> bool:
            return await figure(gw, "gateway_streams_open") == expected

        await wait_until(lambda: streams(10), 15)
        before = await figure(gw, ANSWERED)
        victims = workers(gw)
        for pid in victims:
            os.kill(pid, number)
        await asyncio.gather(*asking, return_exceptions=True)
        await wait_until(lambda: gw.answers("/health"), 20)
        await wait_until(lambda: streams(0), 20)
        # Counters must not decrease.
        assert await figure(gw, ANSWERED) == before


@session
async def test_streams_of_the_others_go_on_while_processes_die(
    provider: FakeProvider, backend: FakeAppBackend, valkey: RedisServer, tmp_path: Path
) -> None:
    """Each round ends one of two processes in another way. The figures of the dead stay in the same few files."""
    constants = {"gateway.supervisor.PATIENCE": 1}
    async with running(valkey, provider, tmp_path, constants, TMPDIR=str(temporary(tmp_path))) as gw:
        (folder,) = temporary(tmp_path).glob(f"{PREFIX}*")
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP):
            await wait_until(lambda: len([pid for pid in workers(gw) if descriptors(pid) > STARTED]) == 2, 30)
            app, gate = await gw.app(backend), asyncio.Event()
            prompt = provider.plays(
                ROLE, chunk("Gu"), gate, chunk("ten"), chunk(finish="stop"), chunk(usage=(3, 2)), DONE
            )
            headers = app.headers(Connection="close")
            body = {"prompt": prompt, "stream": True}
            asking = [asyncio.create_task(app.post(body, headers=headers)) for _ in range(12)]
            await wait_until(lambda prompt=prompt: len(provider.asked(prompt)) == 12, 15)
            # Either process may have accepted most of the streams, or all; that one goes on.
            victim, survivor = sorted(workers(gw), key=descriptors)
            os.kill(victim, number)
            await wait_until(lambda victim=victim: victim not in workers(gw), 15)
            gate.set()
            ends = await asyncio.gather(*asking, return_exceptions=True)
            whole = [end for end in ends if isinstance(end, httpx.Response) and end.text.count("event: done") == 1]
            cut = [end for end in ends if isinstance(end, httpx.TransportError)]
            assert len(whole) + len(cut) == 12, ends
            assert len(whole) >= 6
            assert survivor in workers(gw)
        await wait_until(lambda: len(workers(gw)) == 2, 20)
        await wait_until(lambda: gw.answers("/ready"), 20)
        assert {path.name for path in folder.iterdir()} <= FILES
        gw.tracebacks_allowed = True


@session
async def test_a_killed_supervisor_leaves_the_port_and_lets_streams_end(
    provider: FakeProvider, backend: FakeAppBackend, valkey: RedisServer, tmp_path: Path
) -> None:
    """Its processes served for ever, and no other gateway could have their port."""
    async with running(valkey, provider, tmp_path) as gw:
        app = await gw.app(backend)
        gate = asyncio.Event()
        prompt = provider.plays(ROLE, chunk("Gu"), gate, chunk("ten"), chunk(finish="stop"), chunk(usage=(3, 2)), DONE)
        asking = asyncio.create_task(app.post({"prompt": prompt, "stream": True}, headers=app.headers()))
        await wait_until(lambda: provider.asked(prompt), 15)
        orphans = workers(gw)
        gw.kill()

        async def port_is_free() -> bool:
            return not await asyncio.to_thread(accepts, gw.port)

        await wait_until(port_is_free, 15)
        gate.set()
        assert (await asking).text.count("event: done") == 1
        await wait_until(lambda: not any(map(lives, orphans)), 15)
        await gw.start()
        assert await gw.answers("/ready")


@session
async def test_a_stop_ends_a_process_that_hangs(provider: FakeProvider, valkey: RedisServer, tmp_path: Path) -> None:
    """The supervisor waited for it for ever."""
    constants = {"gateway.supervisor.PATIENCE": 0.5}
    async with running(valkey, provider, tmp_path, constants) as gw:
        await wait_until(lambda: gw.log.count("Application startup complete") == 2, 20)
        stopped = workers(gw)[0]
        os.kill(stopped, signal.SIGSTOP)
        assert await gw.stop() == 0
        assert not lives(stopped)


@session
async def test_a_process_that_cannot_start_ends_the_service(
    provider: FakeProvider, valkey: RedisServer, tmp_path: Path
) -> None:
    """A descriptor limit of 20 leaves none for the processes."""
    async with running(valkey, provider, tmp_path, start=False) as gw:
        gw.prefix = ["sh", "-c", 'ulimit -n 20; exec "$@"', "sh"]
        with pytest.raises(RuntimeError, match="did not start"):
            await gw.start()
        assert gw.log.count('"event":"process.ended"') <= 2
        gw.tracebacks_allowed = True


def test_a_process_that_dies_at_its_start_is_not_replaced_at_once(tmp_path: Path) -> None:
    """The supervisor replaced it twice a second, each time for a second of CPU."""
    config = uvicorn.Config("nowhere:create", factory=True, workers=1, log_config=None)
    with socket.socket() as listener:
        child = Child(0, config, listener, tmp_path)
        starts, now = [], 0.0
        while now < 60:
            child.check(now)
            if child.process is not None:
                starts.append(now)
                child.process.kill()
                child.process.join()
                child.check(now)
            now += TICK
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert pauses[:5] == [0.5, 1, 2, 4, 8]
    assert set(pauses[5:]) == {10}


def test_only_the_live_gauges_of_that_number_are_removed(tmp_path: Path) -> None:
    names = ["gauge_livesum_1.db", "gauge_livesum_11.db", "gauge_livemostrecent_1.db", "counter_1.db", "histogram_1.db"]
    for name in names:
        (tmp_path / name).touch()
    remove_gauges(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"gauge_livesum_11.db", "counter_1.db", "histogram_1.db"}


@pytest.mark.asyncio(loop_scope="session")
async def test_the_next_start_removes_what_a_killed_one_left(
    provider: FakeProvider, valkey: RedisServer, tmp_path: Path
) -> None:
    """A folder of figures stayed in /tmp for each SIGKILL."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    gw = Gateway(valkey.url, provider, tmp_path, TMPDIR=str(temporary))
    gw.workers = 2
    try:
        await gw.start()
        (left,) = temporary.glob(f"{PREFIX}*")
        orphans = workers(gw)
        gw.kill()
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        assert left.exists()
        await gw.start()
        (found,) = temporary.glob(f"{PREFIX}*")
        assert found != left
        assert await figure(gw, "gateway_streams_open") == 0
        await gw.stop()
        assert not [*temporary.glob(f"{PREFIX}*")]
    finally:
        await gw.stop()
        await gw.http.aclose()


def test_folders_in_use_and_links_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    with metrics_folder() as first, metrics_folder() as second:
        assert first.exists()
        assert second.exists()
        assert first != second
    assert (tmp_path / "elsewhere" / "lock").exists()


@pytest.mark.asyncio(loop_scope="session")
async def test_a_single_process_has_its_own_figures_only(
    provider: FakeProvider, valkey: RedisServer, tmp_path: Path
) -> None:
    """With PROMETHEUS_MULTIPROC_DIR set, the figures of earlier runs were added to its own."""
    folder = tmp_path / "figures"
    folder.mkdir()
    gw = Gateway(valkey.url, provider, tmp_path, PROMETHEUS_MULTIPROC_DIR=str(folder))
    try:
        await gw.start()
        assert await figure(gw, "gateway_streams_open") == 0
        assert not [*folder.iterdir()]
    finally:
        await gw.stop()
        await gw.http.aclose()
