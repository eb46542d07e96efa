"""What a connection takes for a request, and which answer belongs to it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from tests.support.http_site import GET, Site, serving

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
SLOW = GET.replace(b"/ ", b"/slow ")


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
async def port(site: Site) -> AsyncIterator[int]:
    async with serving(site) as port:
        yield port


async def talk(port: int, *parts: bytes, pause: float = 0.02) -> bytes:
    """Sends the parts one by one, and returns everything that came until the server closed, or was silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        while more := await asyncio.wait_for(reader.read(65_536), 0.5):
            received += more
    writer.close()
    return received


@pytest.mark.parametrize("upgrade", ["h2c", "websocket", "TLS/1.0, HTTP/2.0", "anything"])
@pytest.mark.parametrize("length", [b"content-length: %d" % len(SMUGGLED), b"transfer-encoding: chunked"])
@pytest.mark.parametrize("connection", ["Upgrade", "keep-alive, upgrade", "upgrade, HTTP2-Settings"])
@pytest.mark.parametrize("at_once", [True, False], ids=["in one read", "in two reads"])
async def test_a_body_is_no_request_although_its_head_asks_for_an_upgrade(
    port: int, site: Site, upgrade: str, length: bytes, connection: str, at_once: bool
) -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\nConnection: %b\r\nUpgrade: %b\r\n%b\r\n\r\n" % (
        connection.encode(),
        upgrade.encode(),
        length,
    )
    body = CHUNKED if b"chunked" in length else SMUGGLED
    said = await talk(port, *([head + body] if at_once else [head, body]))
    assert site.requests == [("POST", "/echo")]
    assert site.bodies == [SMUGGLED]
    assert said.count(b"HTTP/1.1 200 OK") == 1
    assert b"ok" in said


async def test_requests_behind_one_that_asks_for_an_upgrade_are_answered_in_turn(port: int, site: Site) -> None:
    asks = b"GET /%d HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    said = await talk(port, b"".join(asks % number for number in range(5)))
    assert site.requests == [("GET", f"/{number}") for number in range(5)]
    assert said.count(b"HTTP/1.1 200 OK") == 5


async def test_an_application_does_not_see_the_upgrade(port: int, site: Site) -> None:
    headers = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    await talk(port, b"GET / HTTP/1.1\r\nhost: x\r\n%b\r\n" % headers)
    assert dict(site.headers[0]) == {b"host": b"x", b"connection": b"http2-settings", b"http2-settings": b"AA"}


async def test_no_tunnels(port: int, site: Site) -> None:
    said = await talk(port, b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\n\r\n" + SMUGGLED)
    assert said.startswith(b"HTTP/1.1 400 ")
    assert said.count(b"HTTP/1.1") == 1
    assert site.requests == []


# -- garbage behind a request whose answer is pending ---------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"\0garbage\r\n\r\n", b"x: y\r\n" * 20_000, b"GET / HTTP/9.9\r\n\r\n"])
@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["at once", "amid the answer"])
async def test_garbage_does_not_take_the_place_of_an_answer(port: int, garbage: bytes, pause: float) -> None:
    """It lost an answer that was paid for, or landed in the middle of it."""
    said = await talk(port, SLOW, garbage[:50_000], pause=pause)
    first, _, second = said.partition(b"0\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert first.endswith(b"5\r\nslow \r\n" * 5 + b"3\r\nend\r\n")
    assert second == b"" or second.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert b"connection: close" in said.lower()


async def test_each_request_before_the_garbage_has_its_answer(port: int, site: Site) -> None:
    said = await talk(port, SLOW + GET + GET + b"\0")
    assert [part[:3] for part in said.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"200", b"400"]
    assert len(site.requests) == 3


async def test_a_body_that_breaks_off_into_garbage_is_no_body(port: int, site: Site) -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    said = await talk(port, GET + head + b"3\r\nabc\r\nzz\r\n")
    assert [part[:3] for part in said.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]
    assert site.bodies in ([], [b"abc"])
    assert said.count(b"ok") == 1


# -- HTTP/1.0 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [b"", b"connection: keep-alive\r\n"])
async def test_old_clients_get_no_chunks(port: int, extra: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /slow HTTP/1.0\r\n" + extra + b"\r\n")
    head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body == b"slow " * 5 + b"end"
    writer.close()


async def test_nothing_is_read_behind_the_last_request(port: int, site: Site) -> None:
    for last in (
        GET.replace(b"host", b"connection: close\r\nhost"),
        b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
    ):
        site.requests.clear()
        said = await talk(port, last + SMUGGLED, SMUGGLED)
        assert said.count(b"HTTP/1.1 200 OK") == 1
        assert site.requests == [("GET", "/")]


async def test_a_head_has_no_body(port: int) -> None:
    said = await talk(port, b"HEAD /slow HTTP/1.1\r\nhost: x\r\n\r\n" + GET)
    assert said.count(b"HTTP/1.1 200 OK") == 2
    assert b"slow" not in said


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
