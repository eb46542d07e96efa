"""Attempts to hold a connection, or memory behind it, for ever. Each ends within the bounds of the protocol."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from gateway import connections, protocol
from tests.support.http_site import GET, HANG, Site, serving
from tests.support.polling import wait_until

CHUNKED = b"POST /read HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
async def port(site: Site) -> AsyncIterator[int]:
    async with serving(site) as port:
        yield port


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_SECONDS", "LEFTOVER_SECONDS", "STALL_SECONDS"):
        monkeypatch.setattr(protocol, name, 0.2)
    monkeypatch.setattr(connections, "SWEEP_SECONDS", 0.05)


async def held(writer: asyncio.StreamWriter, *, drip: bytes = b"", every: float = 0.05, most: float = 6) -> float:
    """Seconds until the server ended the connection, while the client sends `drip` again and again."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while connections.CONNECTIONS:
        assert loop.time() - began < most, "the connection is still open"
        if drip:
            writer.write(drip)
        await asyncio.sleep(every)
    writer.close()
    return loop.time() - began


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("drip", [b"\r\n", b"\n", b"G"], ids=["crlf", "lf", "letter"])
async def test_bytes_that_are_no_request_after_an_answer(port: int, drip: bytes) -> None:
    """A lone line break canceled the server's keep-alive timer, and nothing else ended the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    await reader.readuntil(b"ok")
    await held(writer, drip=drip)


@pytest.fixture
def short_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "KEEP_ALIVE_SECONDS", 1.0)
    monkeypatch.setattr(connections, "SWEEP_SECONDS", 0.05)


@pytest.mark.usefixtures("short_keep_alive")
async def test_a_connection_without_a_further_request(port: int) -> None:
    connections.ENDED.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(4):  # each of them starts the time anew
        writer.write(GET)
        await reader.readuntil(b"ok")
        await asyncio.sleep(0.5)
    assert 0.1 < await held(writer) < 2
    assert await reader.read() == b"", "closed, not aborted"
    assert not connections.ENDED, "nothing was wrong with it"


@pytest.mark.usefixtures("short_keep_alive")
async def test_a_body_that_ends_long_after_its_answer_leaves_time_for_the_next_request(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 12\r\n\r\n")
    await reader.readuntil(b"ok")
    for _ in range(12):
        writer.write(b"x")
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.3)
    writer.write(GET)
    assert await reader.readuntil(b"ok")
    writer.close()


@pytest.mark.usefixtures("short_keep_alive")
async def test_an_answer_that_takes_longer_than_a_connection_may_idle(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    await reader.readuntil(b"ok")
    writer.write(HANG)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(), 1.5)
    writer.close()


@pytest.mark.usefixtures("hasty")
async def test_one_line_break_after_an_answer(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    await reader.readuntil(b"ok")
    writer.write(b"\r\n")
    await held(writer)


@pytest.mark.usefixtures("hasty")
async def test_a_body_that_ends_soon_after_its_answer(port: int) -> None:
    """The rest of the body canceled the keep-alive timer as well."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\na")
    await reader.readuntil(b"ok")
    writer.write(b"b")
    await held(writer)


@pytest.mark.usefixtures("hasty")
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
    ids=["nothing", "1.1", "1.0", "after an upgrade", "after a request", "during an answer"],
)
async def test_a_head_that_drips(port: int, opening: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    await wait_until(lambda: connections.CONNECTIONS)
    writer.write(opening)
    await held(writer, drip=b"y" if opening else b"")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"x" * 1000])
async def test_upgrades_are_answered_and_ended(port: int, protocol: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Each one logged two warnings, of which the second advised to install a WebSocket library."""
    caplog.set_level(logging.WARNING)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: %b\r\n\r\n" % protocol)
    await reader.readuntil(b"ok")
    await held(writer, drip=b"\x81\x85")
    assert "WebSocket" not in caplog.text


@pytest.mark.usefixtures("hasty")
async def test_an_answer_left_unread_at_its_end(port: int) -> None:
    """Less than the high-water mark was left unsent: nothing paused, so nothing was stalled, and close waited."""
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
    ids=["trailers", "a trailer", "an extension", "after an answer", "during an answer", "before a request"],
)
async def test_bytes_that_are_neither_head_nor_body(port: int, stream: Iterator[bytes]) -> None:
    """Trailers were kept without a bound, and a long one was copied with each packet."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    with contextlib.suppress(ConnectionError):
        for piece in stream:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            await asyncio.sleep(0)
    assert sent < 10_000_000  # what the kernel buffers on both sides
    await wait_until(lambda: not connections.CONNECTIONS)
    writer.close()


async def test_trailers_do_not_become_headers(port: int, site: Site) -> None:
    """They were added to the headers of the request, behind those that a proxy had checked."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(CHUNKED + b"1\r\nx\r\n0\r\nx-forwarded-for: 192.0.2.1\r\n\r\n")
    await reader.readuntil(b"ok")
    assert b"x-forwarded-for" not in dict(site.headers[0])
    writer.close()


async def test_requests_without_end_behind_one_that_takes_long(port: int) -> None:
    """Each was queued, so 18 bytes of a client became two kilobytes of ours."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HANG)
    await wait_until(lambda: connections.CONNECTIONS)
    (connection,) = connections.CONNECTIONS
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 50_000)
    await wait_until(lambda: not connections.CONNECTIONS)
    assert len(connection.queue) <= protocol.PIPELINED
    writer.close()


async def test_the_request_under_way_notices_that_a_pipelining_client_left(port: int, site: Site) -> None:
    """Only the newest request was notified: the one under way went on for ever."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HANG + GET)
    await wait_until(lambda: any(c.queue for c in connections.CONNECTIONS))
    writer.close()
    await wait_until(lambda: site.left == 1)
