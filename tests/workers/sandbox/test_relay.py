"""The relay between the visitors of an app and the app, without a sandbox around it, and which bytes pass it."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.relays import relayed, relaying
from workers.hosting.sleep import Idle, ask_relay
from workers.sandbox import network, relay
from workers.sandbox.trailers import HEAD_BYTES, LINE_BYTES, ResponseReader

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


COOKIE = b"Set-Cookie: a=1; Domain=apps.test\r\n"
CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
UNCHANGED = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.0 200 OK\n\nuntil the end\r\n0\r\n" + COOKIE,
    b"HTTP/1.1 304\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 \r\n\r\n0\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + COOKIE,
    CHUNKS + LAST,
    CHUNKS + b'3;name="a"\r\nabc\r\nA \r\n0123456789\r\n' + LAST,
    CHUNKS + b"5\r\n0\r\n\r\n\r\n" + LAST,
    b"HTTP/1.1 103 Early Hints\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS + b"1\r\na\r\n" + LAST,
    CHUNKS + b"3\r\nab",  # cut, and not completed here
]


@pytest.mark.parametrize("step", [1, 2, 7, 65_536])
def test_trailers_are_cut_off(step: int) -> None:
    head = CHUNKS.replace(b"\r\n\r\n", b"\r\nTrailer: Set-Cookie\r\n\r\n")
    for chunks in (b"", b"2\r\nok\r\n", b"2\r\nok\r\n1\r\n\n\r\n"):
        for trailers in (COOKIE, b"X: 1\r\n" + COOKIE * 3, COOKIE.replace(b"\r\n", b"\n"), b" " + COOKIE):
            for end in (b"0\r\n", b"0000 ;a=b\r\n"):
                assert passed_on(head + chunks + end + trailers + b"\r\n" + LAST, step) == head + chunks + end + b"\r\n"


@pytest.mark.parametrize("step", [1, 3, 65_536])
@pytest.mark.parametrize("response", UNCHANGED, ids=range(len(UNCHANGED)))
def test_everything_else_passes_unchanged(response: bytes, step: int) -> None:
    assert passed_on(response, step) == response


def test_each_byte_passes_as_soon_as_its_part_is_known() -> None:
    response = ResponseReader()
    assert response.pass_on(CHUNKS[:-1]) == b""
    assert response.pass_on(CHUNKS[-1:] + b"1") == CHUNKS
    assert response.pass_on(b"2\r\nab") == b"12\r\nab"
    assert response.pass_on(b"c") == b"c"


@pytest.mark.parametrize(
    "response",
    [
        b"220 mail.example.com ESMTP\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n Transfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n Transfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding : chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\rTransfer-Encoding: chunked\r\n\r\n",
        CHUNKS + b"\r\n",
        CHUNKS + b" 1\r\na\r\n",
        CHUNKS + b"1\na\r\n",
        CHUNKS + b"-1\r\na\r\n",
        CHUNKS + b"1" * 16 + b"\r\n",
        CHUNKS + b"1;" + b"a" * LINE_BYTES,
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * HEAD_BYTES,
    ],
    ids=range(13),
)
def test_what_may_be_read_in_two_ways_is_refused(response: bytes) -> None:
    with pytest.raises(OSError, match="the app's response"):
        passed_on(response, 65_536)


def test_many_chunks_and_many_interim_responses_take_little_time() -> None:
    began = time.process_time()
    passed_on(CHUNKS + b"1\r\na\r\n" * 100_000 + LAST, 65_536)
    passed_on(b"HTTP/1.1 103 \r\n\r\n" * 100_000, 65_536)
    assert time.process_time() - began < 2


def passed_on(response: bytes, step: int) -> bytes:
    reading = ResponseReader()
    return b"".join(reading.pass_on(response[at : at + step]) for at in range(0, len(response), step))
