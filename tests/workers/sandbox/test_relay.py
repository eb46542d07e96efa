"""The relay between the visitors of an app and the app, without a sandbox around it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.relays import relayed, relaying
from workers.hosting.sleep import Idle, ask_relay, until_readable
from workers.sandbox import network, relay

Talk = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Running = Callable[..., contextlib.AbstractAsyncContextManager["App"]]
REQUEST = b"GET / HTTP/1.1\r\nHost: shop.apps.test\r\n\r\n"


class App:
    """An app that answers a connection when its test says so."""

    def __init__(self, path: Path) -> None:
        self.path = self.control = path
        self.connections = list[Talk]()

    async def ask(self) -> Talk:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(REQUEST)
        return reader, writer

    async def has(self, count: int) -> None:
        await wait_until(lambda: len(self.connections) == count)


@pytest.fixture
def app(tmp_path: Path) -> Running:
    @contextlib.asynccontextmanager
    async def running(**seconds: float) -> AsyncIterator[App]:
        limits = relay.RelayLimits(requests=3, waiting=2, **seconds)  # type: ignore[arg-type]
        app = App(tmp_path / "sock")

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            app.connections.append((reader, writer))

        async with relayed(connected, app.path, limits) as app.control:
            yield app
            for _, writer in app.connections:
                writer.close()

    return running


async def test_a_burst_is_served_as_far_as_there_is_room(app: Running) -> None:
    """The relay accepts all of it at once, and the next request begins when one ends.

    A refusal reaches a visitor that goes on sending.
    """
    async with app() as running:
        burst = [socket.socket(socket.AF_UNIX) for _ in range(10)]
        for each in burst:
            each.connect(str(running.path))
            each.sendall(REQUEST)
        visitors = [await asyncio.open_unix_connection(sock=each) for each in burst]
        await running.has(3)
        _, sending = visitors[5]
        for _ in range(50):
            sending.write(b"x" * 100_000)
            await sending.drain()
        for reader, _ in visitors[5:]:
            refused = await asyncio.wait_for(reader.read(), 5)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: 1\r\n" in refused
            head, _, body = refused.partition(b"\r\n\r\n")
            assert f"Content-Length: {len(body)}".encode() in head
        for count in (4, 5):
            for _, writer in (running.connections[count - 4], visitors[count - 4]):
                writer.close()
            await running.has(count)
        for _, writer in visitors:
            writer.close()


async def test_a_request_waits_only_so_long(app: Running) -> None:
    async with app(wait_seconds=0.1) as running:
        visitors = [await running.ask() for _ in range(4)]
        assert (await asyncio.wait_for(visitors[3][0].read(), 5)).startswith(b"HTTP/1.1 503 ")
        assert len(running.connections) == 3
        for _, writer in visitors:
            writer.close()


async def test_a_connection_without_progress_ends(app: Running) -> None:
    async with app(idle_seconds=0.4) as running:
        reader, writer = await running.ask()
        await running.has(1)
        from_app, to_app = running.connections[0]
        to_app.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(5):
            await asyncio.sleep(0.2)
            to_app.write(b"x")
        await reader.readuntil(b"\r\n\r\n")
        assert await asyncio.wait_for(reader.readexactly(5), 5) == b"xxxxx", "an app that goes on may take long"
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(from_app.read(), 5) == REQUEST
        writer.close()


# -- an app that has closed its connection before it has read all --------------------------------------------


async def early_app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers, and closes the connection with unread bytes of the request, which resets it."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(EARLY)
    await writer.drain()
    writer.close()


EARLY = b"HTTP/1.1 413 Too Large\r\nContent-Length: 10000\r\nConnection: close\r\n\r\n" + b"x" * 10_000


@pytest.mark.parametrize("reads", ["at once", "at the end"])
async def test_an_early_answer_reaches_a_visitor_that_goes_on_sending(tmp_path: Path, reads: str) -> None:
    async with relayed(early_app, tmp_path / "sock"):
        for _ in range(20):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "sock", limit=1 << 20)
            writer.write(REQUEST)
            answer = asyncio.create_task(reader.read(-1)) if reads == "at once" else None
            for _ in range(50):
                writer.write(b"x" * 100_000)
                await writer.drain()
            writer.write_eof()
            assert await asyncio.wait_for(answer or reader.read(-1), 10) == EARLY
            writer.close()


@pytest.mark.parametrize("limit", ["DROPPED_BYTES", "DROP_SECONDS"])
async def test_what_an_app_does_not_read_is_dropped_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(network, limit, 1)
    async with relayed(early_app, tmp_path / "sock"):
        _, writer = await asyncio.open_unix_connection(tmp_path / "sock", limit=1 << 20)
        writer.write(REQUEST)

        async def send() -> None:
            while True:
                writer.write(b"x" * 1_000)
                await writer.drain()
                await asyncio.sleep(0.01)

        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await asyncio.wait_for(send(), 10)
        writer.close()


# -- sleep ---------------------------------------------------------------------------------------------------


async def test_an_idle_app_gives_its_listener_away_until_the_worker_leaves(app: Running) -> None:
    async with app() as running:
        _, visitor = await running.ask()
        await running.has(1)
        left = await ask_relay(running.control, 0.5)
        assert left == 0.5, "a request is in progress"
        running.connections[0][1].close()
        visitor.close()
        await wait_until(lambda: ask_relay(running.control, 30), holds=lambda left: 29 < left < 30)
        await asyncio.sleep(0.3)
        idle = await ask_relay(running.control, 0.2)
        assert isinstance(idle, Idle)
        assert idle.listener.getsockname() == str(running.path)
        _, late = await running.ask()
        await until_readable(idle.listener)
        assert len(running.connections) == 1, "the relay accepts no connection"
        idle.listener.close()
        idle.relay.close()
        await running.has(2)
        late.close()


async def test_a_connection_whose_visitor_has_left_keeps_no_app_awake(app: Running) -> None:
    async with app(gone_seconds=0.2) as running:
        _, visitor = await running.ask()
        await running.has(1)
        from_app, _ = running.connections[0]
        await from_app.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.5)
        assert await ask_relay(running.control, 0.2) == 0.2, "the visitor is there"
        visitor.close()
        idle = await wait_until(lambda: ask_relay(running.control, 0.2), holds=lambda idle: isinstance(idle, Idle))
        idle.listener.close()
        idle.relay.close()


async def test_requests_of_monitors_are_not_counted(app: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "REQUEST", REQUEST[:-2] + b"user-agent: capsule-uptime\r\n\r\n")
    async with app() as running:
        await asyncio.sleep(0.3)
        _, visitor = await running.ask()
        await running.has(1)
        assert await ask_relay(running.control, 0.2) == 0, "it is idle, but its answer must not be cut"
        running.connections[0][1].close()
        visitor.close()
        idle = await wait_until(lambda: ask_relay(running.control, 0.2), holds=lambda idle: isinstance(idle, Idle))
        idle.listener.close()
        idle.relay.close()


async def test_requests_wait_until_an_app_that_starts_listens(tmp_path: Path) -> None:
    path, answered = tmp_path / "sock", list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answered.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        writer.close()

    async with relaying(port := free_port(), path):
        visitors = [await asyncio.open_unix_connection(path) for _ in range(5)]
        for _, writer in visitors:
            writer.write(REQUEST)
        await asyncio.sleep(0.3)
        async with await asyncio.start_server(answer, "127.0.0.1", port):
            for reader, writer in visitors:
                assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 204 ")
                writer.close()
        assert answered == [REQUEST] * 5
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(REQUEST)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) == b"", "an app that has listened before is not waited for"
        writer.close()
