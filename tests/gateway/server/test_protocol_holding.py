"""Attempts to hold a connection, or its memory, forever. Each ends within the limits of the protocol."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import pytest

from gateway.server import connections, protocol
from gateway.server.protocol import ConnectionTimes
from tests.support.http_site import GET, HANG, Site
from tests.support.polling import wait_until

CHUNKED = b"POST /read HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

short_limits = pytest.mark.parametrize("times", [ConnectionTimes(head=0.2, leftover=0.2, stall=0.2)], ids=["short"])
short_keep_alive = pytest.mark.parametrize("times", [ConnectionTimes(keep_alive=1.0)], ids=["short"])


async def ask(port: int, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects, and returns after the response to a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await reader.readuntil(b"ok")
    return reader, writer


async def hold(writer: asyncio.StreamWriter, *, drip: bytes = b"", every: float = 0.05, most: float = 6) -> float:
    """Sends `drip` again and again. Returns the seconds until the server closes the connection."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while connections.CONNECTIONS:
        assert loop.time() - began < most, "the connection is still open"
        if drip:
            writer.write(drip)
        await asyncio.sleep(every)
    writer.close()
    return loop.time() - began


@short_limits
@pytest.mark.parametrize(
    ("asked", "drip"),
    [
        (GET, b"\r\n"),
        (GET, b"\n"),
        (GET, b"G"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n", b"x" * 1_000),
        (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", b"\x81\x85"),
    ],
    ids=["crlf", "lf", "letter", "a long body", "after an upgrade"],
)
async def test_bytes_after_a_response_that_are_not_a_request(
    port: int, asked: bytes, drip: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    _, writer = await ask(port, asked)
    await hold(writer, drip=drip)
    assert "WebSocket" not in caplog.text


@short_keep_alive
async def test_a_connection_without_a_further_request(port: int) -> None:
    connections.ENDED.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(4):  # each request restarts the time
        writer.write(GET)
        await reader.readuntil(b"ok")
        await asyncio.sleep(0.5)
    assert 0.1 < await hold(writer) < 2
    assert await reader.read() == b"", "closed, not aborted"
    assert not connections.ENDED, "it is not an error"


@short_keep_alive
async def test_after_a_late_end_of_a_body_there_is_time_for_the_next_request(port: int) -> None:
    reader, writer = await ask(port, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 12\r\n\r\n")
    for _ in range(12):
        writer.write(b"x")
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.3)
    writer.write(GET)
    assert await reader.readuntil(b"ok")
    writer.close()


@short_keep_alive
async def test_a_response_may_take_longer_than_the_keep_alive(port: int) -> None:
    reader, writer = await ask(port, GET)
    writer.write(HANG)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(), 1.5)
    writer.close()


@short_limits
async def test_a_body_that_ends_soon_after_its_response(port: int) -> None:
    _, writer = await ask(port, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\na")
    writer.write(b"b")
    await hold(writer)


@short_limits
@pytest.mark.parametrize(
    "opening",
    [
        b"",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: ",
        b"GET / HTTP/1.0\r\nx: ",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nGET / HTTP/1.1\r\nx:",
        GET + b"GET / HTTP/1.1\r\nx: ",
        HANG + b"GET / HTTP/1.1\r\nx: ",
    ],
    ids=["nothing", "1.1", "1.0", "after an upgrade", "after a request", "during a response"],
)
async def test_a_head_that_drips(port: int, opening: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    await wait_until(lambda: connections.CONNECTIONS)
    writer.write(opening)
    await hold(writer, drip=b"y" if opening else b"")


@short_limits
async def test_a_response_that_is_not_read(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(GET.replace(b"/ ", b"/endless ", 1))
    await reader.readuntil(b"\r\n\r\n")
    await hold(writer)


@short_limits
async def test_a_response_whose_end_is_not_read(port: int) -> None:
    """The unsent rest is below the high-water mark, so writing does not pause. The connection is closed anyway."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(client, GET.replace(b"/ ", b"/nearly ", 1))
    await wait_until(lambda: connections.CONNECTIONS)
    await wait_until(lambda: not connections.CONNECTIONS, 9)
    client.close()


def pieces(opening: bytes, piece: bytes) -> Iterator[bytes]:
    yield opening
    for _ in range(20_000_000 // len(piece)):
        yield piece


@pytest.mark.parametrize(
    "stream",
    [
        pieces(CHUNKED + b"0\r\n", b"x: y\r\n" * 10_000),
        pieces(CHUNKED + b"0\r\nx: ", b"y" * 60_000),
        pieces(CHUNKED + b"1;", b"x" * 60_000),
        pieces(GET, b"\r\n" * 30_000),
        pieces(HANG, b"\r\n" * 30_000),
        pieces(b"", b"\r\n" * 30_000),
    ],
    ids=["trailers", "a trailer", "an extension", "after a response", "during a response", "before a request"],
)
async def test_endless_bytes_outside_heads_and_bodies(port: int, stream: Iterator[bytes]) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    with contextlib.suppress(ConnectionError):
        for piece in stream:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            await asyncio.sleep(0)
    assert sent < 10_000_000  # the buffers of the kernel on both sides
    await wait_until(lambda: not connections.CONNECTIONS)
    writer.close()


async def test_trailers_do_not_become_headers(port: int, site: Site) -> None:
    """They could replace headers that a proxy has checked."""
    _, writer = await ask(port, CHUNKED + b"1\r\nx\r\n0\r\nx-forwarded-for: 192.0.2.1\r\n\r\n")
    assert b"x-forwarded-for" not in dict(site.headers[0])
    writer.close()


async def test_endless_pipelined_requests_behind_a_slow_one(port: int) -> None:
    """Each queued request takes two kilobytes, so their number is limited."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HANG)
    await wait_until(lambda: connections.CONNECTIONS)
    (connection,) = connections.CONNECTIONS
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 50_000)
    await wait_until(lambda: not connections.CONNECTIONS)
    assert len(connection.queue) <= protocol.PIPELINED_REQUESTS
    writer.close()


async def test_the_current_request_notices_that_a_pipelining_client_disconnected(port: int, site: Site) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HANG + GET)
    await wait_until(lambda: any(c.queue for c in connections.CONNECTIONS))
    writer.close()
    await wait_until(lambda: site.left == 1)
