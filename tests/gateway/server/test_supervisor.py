"""Processes that die, in different ways, are replaced, and the files of their gauges are removed."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import pytest
import uvicorn
from structlog.testing import capture_logs

from gateway.server import supervisor
from gateway.server.supervisor import PREFIX, TICK_SECONDS, Child, remove_gauges, run_child
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk
from tests.fakes.server import CLOSE, Raw
from tests.support.gateway_process import Gateway, gateway
from tests.support.polling import wait_until
from tests.support.processes import list_children
from tests.support.redis_servers import RedisServer

session = pytest.mark.asyncio(loop_scope="session")

KINDS = ("counter", "histogram", "gauge_livesum", "gauge_livemax", "gauge_livemin", "gauge_livemostrecent")
FILES = {"lock", *(f"{kind}_{number}.db" for kind in KINDS for number in (0, 1))}
STARTED = 25  # descriptors that a process has once it serves, and not before


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def workers(gw: Gateway) -> list[int]:
    """Returns the pids of the serving processes. The supervisor's other child tracks resources."""
    found = []
    for child in list_children(gw.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may have exited since
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def serves_with_two(gw: Gateway) -> None:
    """Waits until two processes serve."""
    await wait_until(lambda: len([pid for pid in workers(gw) if descriptors(pid) > STARTED]) == 2, 30)


@session
async def test_streams_of_other_processes_continue_while_processes_die(
    provider: FakeProvider, backend: FakeAppBackend, valkey: RedisServer, tmp_path: Path
) -> None:
    """Each round kills one of two processes in another way. The metrics stay in the same few files."""
    constants = {"gateway.server.supervisor.ANSWER_SECONDS": 3}
    (temporary := tmp_path / "tmp").mkdir()
    async with gateway(valkey.url, provider, tmp_path, constants, workers=2, TMPDIR=str(temporary)) as gw:
        (folder,) = temporary.glob(f"{PREFIX}*")
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP):
            await serves_with_two(gw)
            app, gate = await gw.app(backend), asyncio.Event()
            rest = [chunk("ten"), chunk(finish="stop"), chunk(usage=(3, 2)), DONE]
            # Idle connections to the provider would count as streams in the next round.
            prompt = provider.plays(ROLE, chunk("Gu"), gate, rest, Raw(b"0\r\n\r\n"), CLOSE)
            headers = app.headers(Connection="close")
            body = {"prompt": prompt, "stream": True}
            asking = [asyncio.create_task(app.post(body, headers=headers)) for _ in range(12)]
            await wait_until(lambda prompt=prompt: len(provider.asked(prompt)) == 12, 15)
            # Either process may have accepted most of the streams, or all; that one survives.
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
async def test_a_killed_supervisor_frees_the_port_and_lets_streams_end(
    provider: FakeProvider, backend: FakeAppBackend, valkey: RedisServer, tmp_path: Path
) -> None:
    """Its processes drain and exit, another gateway can use the port, and removes its folder."""
    (temporary := tmp_path / "tmp").mkdir()
    async with gateway(valkey.url, provider, tmp_path, workers=2, TMPDIR=str(temporary)) as gw:
        (left,) = temporary.glob(f"{PREFIX}*")
        app = await gw.app(backend)
        gate = asyncio.Event()
        prompt = provider.plays(ROLE, chunk("Gu"), gate, chunk("ten"), chunk(finish="stop"), chunk(usage=(3, 2)), DONE)
        asking = asyncio.create_task(app.post({"prompt": prompt, "stream": True}, headers=app.headers()))
        await wait_until(lambda: provider.asked(prompt), 15)
        orphans = workers(gw)
        gw.kill()
        await wait_until(lambda: asyncio.to_thread(accepts, gw.port), 15, holds=lambda accepting: not accepting)
        gate.set()
        assert (await asking).text.count("event: done") == 1
        await wait_until(lambda: not any(map(is_alive, orphans)), 15)
        assert left.exists()
        await gw.start()
        (found,) = temporary.glob(f"{PREFIX}*")
        assert found != left
        await wait_until(lambda: gw.answers("/ready"))
        await gw.stop()
        assert not [*temporary.glob(f"{PREFIX}*")]


def test_a_process_that_dies_at_its_start_is_replaced_after_growing_pauses(tmp_path: Path) -> None:
    config = uvicorn.Config("nowhere:create", factory=True, workers=1, log_config=None)
    with socket.socket() as listener:
        child = Child(0, config, listener, tmp_path, run_child)
        starts, now = [], 0.0
        while now < 60:
            child.check(now)
            if child.process is not None:
                starts.append(now)
                child.process.kill()
                child.process.join()
                child.check(now)
            now += TICK_SECONDS
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert pauses[:5] == [0.5, 1, 2, 4, 8]
    assert set(pauses[5:]) == {10}


@pytest.fixture
def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs a supervisor whose one process runs `run`, and which is stopped when that serves."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def supervise(run: Callable[..., None]) -> int:
        config = uvicorn.Config("nowhere:create", workers=1, log_config=None, timeout_graceful_shutdown=30)
        return supervisor.Supervisor(config, [], tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM), run).run()

    yield supervise
    for number, handler in before.items():
        signal.signal(number, handler)


def exit_slowly(_number: int, _config: uvicorn.Config, _listeners: object, pipe: Connection) -> None:
    pipe.close()
    time.sleep(1)
    sys.exit(1)


def test_a_process_that_cannot_start_ends_the_service(supervise: Callable[..., int]) -> None:
    """It is not killed while it exits, although it has closed its pipe."""
    with capture_logs() as log:
        assert supervise(exit_slowly) == supervisor.CANNOT_START_EXIT
    assert [(entry["event"], entry["exit_code"]) for entry in log] == [("process.ended", 1)]


def hang(_number: int, _config: uvicorn.Config, _listeners: object, pipe: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.recv()
    pipe.send(True)
    time.sleep(15)  # less than the time of the supervisor for requests


def test_a_stop_kills_a_process_that_hangs(supervise: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ANSWER_SECONDS", 1)
    with capture_logs() as log:
        assert supervise(hang) == 0
    assert [entry["event"] for entry in log] == ["process.killed"]
    assert not is_alive(log[0]["pid"])


def test_only_the_live_gauges_of_that_number_are_removed(tmp_path: Path) -> None:
    names = ["gauge_livesum_1.db", "gauge_livesum_11.db", "gauge_livemostrecent_1.db", "counter_1.db", "histogram_1.db"]
    for name in names:
        (tmp_path / name).touch()
    remove_gauges(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"gauge_livesum_11.db", "counter_1.db", "histogram_1.db"}
