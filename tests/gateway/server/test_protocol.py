"""A connection reads the right bytes as a request, and sends each request its own response."""

import asyncio
import contextlib
import itertools
import socket

import pytest

from tests.support.http_site import GET, Site, serving
from tests.support.polling import PATIENCE_SECONDS

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


async def test_requests_after_an_upgrade_request_are_answered_in_order(port: int, site: Site) -> None:
    asks = b"GET /%d HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    received = await talk(port, b"".join(asks % number for number in range(5)))
    assert site.requests == [("GET", f"/{number}") for number in range(5)]
    assert received.count(b"HTTP/1.1 200 OK") == 5


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
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["a tunnel", "TLS", "a negative length", "two lengths", "an encoding", "HTTP/2"],
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


async def test_each_request_before_the_garbage_gets_its_response(port: int, site: Site) -> None:
    received = await talk(port, SLOW + GET + GET + b"\0")
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"200", b"400"]
    assert len(site.requests) == 3


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
