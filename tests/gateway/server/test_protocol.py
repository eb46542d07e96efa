"""A connection reads the right bytes as a request, sends each request its own response, and cannot be held forever."""

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Iterator

import pytest

from gateway.server import connections, protocol
from gateway.server.protocol import ConnectionTimes
from tests.support.accounts import App
from tests.support.http_site import GET, HANG, Site, serving
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.raw_http import bearer, error_of, is_healthy, request, send

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
SLOW = GET.replace(b"/ ", b"/slow ")


async def talk(port: int, *parts: bytes, pause: float = 0.02, silence: float = 0.5) -> bytes:
    """Sends the parts one by one. Returns everything received until the server closes or is silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        while more := await asyncio.wait_for(reader.read(65_536), silence):
            received += more
    writer.close()
    return received


UPGRADES = ["h2c", "websocket", "TLS/1.0, HTTP/2.0", "anything"]
LENGTHS = [b"content-length: %d" % len(SMUGGLED), b"transfer-encoding: chunked"]
CONNECTIONS = ["Upgrade", "keep-alive, upgrade", "upgrade, HTTP2-Settings"]


@pytest.mark.parametrize("at_once", [True, False], ids=["in one read", "in two reads"])
async def test_the_body_of_an_upgrade_request_is_not_read_as_a_request(at_once: bool) -> None:
    async def ask(upgrade: str, length: bytes, connection: str) -> None:
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\nConnection: %b\r\nUpgrade: %b\r\n%b\r\n\r\n" % (
            connection.encode(),
            upgrade.encode(),
            length,
        )
        body = CHUNKED if b"chunked" in length else SMUGGLED
        site = Site()
        async with serving(site) as port:
            received = await talk(port, *([head + body] if at_once else [head, body]))
        assert site.requests == [("POST", "/echo")], head
        assert site.bodies == [SMUGGLED], head
        assert received.count(b"HTTP/1.1 200 OK") == 1, head
        assert b"ok" in received, head

    # At the same time, because each waits until its connection is silent.
    await asyncio.gather(*(ask(*case) for case in itertools.product(UPGRADES, LENGTHS, CONNECTIONS)))


async def test_an_application_does_not_see_the_upgrade(port: int, site: Site) -> None:
    headers = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    await talk(port, b"GET / HTTP/1.1\r\nhost: x\r\n%b\r\n" % headers)
    assert dict(site.headers[0]) == {b"host": b"x", b"connection": b"http2-settings", b"http2-settings": b"AA"}


@pytest.mark.parametrize(
    "asked",
    [
        b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, x\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["a tunnel", "TLS", "a negative length", "two lengths", "an encoding", "a length and chunks", "HTTP/2"],
)
async def test_what_is_no_request(port: int, site: Site, asked: bytes) -> None:
    received = await talk(port, asked + SMUGGLED)
    assert received.startswith(b"HTTP/1.1 400 Bad Request\r\nx-request-id: ")
    assert received.count(b"HTTP/1.1") == 1
    assert site.requests == []


async def test_a_large_head_is_refused(port: int) -> None:
    assert (await talk(port, GET[:-2] + b"x: " + b"y" * 100_000)).startswith(b"HTTP/1.1 431 ")
    many = await talk(port, GET[:-2] + b"x: y\r\n" * 20_000 + b"\r\n")
    assert many.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))


# -- garbage after a request whose response is pending ---------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"\0garbage\r\n\r\n", b"x: y\r\n" * 20_000, b"GET / HTTP/9.9\r\n\r\n"])
@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["at once", "during the response"])
async def test_garbage_does_not_replace_a_response(port: int, garbage: bytes, pause: float) -> None:
    """The response to the request is complete, and the error follows it."""
    received = await talk(port, SLOW, garbage[:50_000], pause=pause)
    first, _, second = received.partition(b"0\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.endswith(b"5\r\nslow \r\n" * 5 + b"3\r\nend\r\n")
    assert second == b"" or second.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert b"connection: close" in received.lower()


async def test_a_body_that_ends_in_garbage_is_refused(port: int, site: Site) -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    received = await talk(port, GET + head + b"3\r\nabc\r\nzz\r\n")
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]
    assert site.bodies in ([], [b"abc"])
    assert received.count(b"ok") == 1


# -- HTTP/1.0 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [b"", b"connection: keep-alive\r\n"])
async def test_http_1_0_clients_get_no_chunks(port: int, extra: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /slow HTTP/1.0\r\n" + extra + b"\r\n")
    head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body == b"slow " * 5 + b"end"
    writer.close()


async def test_an_http_1_0_client_may_send_no_chunks(port: int, site: Site) -> None:
    """A proxy that ignores the header would read the body as the next request (RFC 9112, section 6.1)."""
    head = b"POST /echo HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (await talk(port, head + CHUNKED)).startswith(b"HTTP/1.1 400 ")
    assert site.requests == []


async def test_nothing_is_read_after_the_last_request(port: int, site: Site) -> None:
    for last in (
        GET.replace(b"host", b"connection: close\r\nhost"),
        b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
    ):
        site.requests.clear()
        received = await talk(port, last + SMUGGLED, SMUGGLED)
        assert received.count(b"HTTP/1.1 200 OK") == 1
        assert site.requests == [("GET", "/")]


async def test_the_response_to_head_has_no_body(port: int) -> None:
    last = GET.replace(b"host: x", b"host: x\r\nconnection: close")
    received = await talk(port, b"HEAD /slow HTTP/1.1\r\nhost: x\r\n\r\n" + last, silence=PATIENCE_SECONDS)
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert b"slow" not in received


async def test_a_request_in_pieces_of_any_size(port: int, site: Site) -> None:
    asked = b"POST /echo HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\nabc"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for size in (1, 2, 3, 7, 50):
        for start in range(0, len(asked), size):
            writer.write(asked[start : start + size])
            await asyncio.sleep(0.001)
        assert b"ok" in await asyncio.wait_for(reader.readuntil(b"ok"), 5)
    assert site.bodies == [b"abc"] * 5
    writer.close()


READ = b"POST /read HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

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
async def test_a_response_may_take_longer_than_the_keep_alive(port: int) -> None:
    reader, writer = await ask(port, GET)
    writer.write(HANG)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(), 1.5)
    writer.close()


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
        pieces(READ + b"0\r\n", b"x: y\r\n" * 10_000),
        pieces(READ + b"1;", b"x" * 60_000),
        pieces(GET, b"\r\n" * 30_000),
        pieces(b"", b"\r\n" * 30_000),
    ],
    ids=["trailers", "an extension", "after a response", "before a request"],
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
    _, writer = await ask(port, READ + b"1\r\nx\r\n0\r\nx-forwarded-for: 192.0.2.1\r\n\r\n")
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


session = pytest.mark.asyncio(loop_scope="session")


@session
async def test_no_more_than_the_limit_is_read(app: App) -> None:
    """The error arrives long before ten megabytes have been sent, with or without a Content-Length."""
    piece = b"x" * 65_536
    sized = request(app.path, b"", bearer(app), "Content-Length: 10485760")
    reply = await send(app.gateway.port, sized, *[piece] * 160)
    assert error_of(reply) == (413, "REQUEST_TOO_LARGE")
    reply = await send(app.gateway.port, request(app.path, b"", bearer(app), "Content-Length: 102401"))
    assert error_of(reply) == (413, "REQUEST_TOO_LARGE"), "before any byte of the body"
    unsized = request(app.path, b"", bearer(app), "Transfer-Encoding: chunked")
    reply = await send(app.gateway.port, unsized, *[b"10000\r\n" + piece + b"\r\n"] * 160)
    assert error_of(reply) == (413, "REQUEST_TOO_LARGE")
    assert await is_healthy(app)


@session
async def test_a_content_length_of_thousands_of_digits(app: App) -> None:
    """It is a number for the parser of HTTP, and none for Python."""
    for length in ("0" * 5_000 + "2", "9" * 5_000, "9" * 19, "0" * 5_000):
        reply = await send(app.gateway.port, request(app.path, b"{}", f"Content-Length: {length}", bearer(app)))
        assert reply is not None
        assert 400 <= reply.status < 500, reply


@session
async def test_a_client_that_expects_100_continue(app: App) -> None:
    body = b'{"prompt":"x"}'
    for authorization, expected in ((bearer(app), b"100"), ("Authorization: Bearer x", b"401")):
        head = request(app.path, b"", authorization, f"Content-Length: {len(body)}", "Expect: 100-continue")
        reader, writer = await asyncio.open_connection("127.0.0.1", app.gateway.port)
        writer.write(head)
        line = await asyncio.wait_for(reader.readline(), 2)
        assert line.split()[1] == expected
        if expected == b"100":
            writer.write(body)
            assert b"200" in await asyncio.wait_for(reader.readuntil(b" 200 "), 5)
        writer.close()
        await writer.wait_closed()
