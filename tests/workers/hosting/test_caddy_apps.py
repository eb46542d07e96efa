"""Requests to an app with a start command, through Caddy. The app is a server of the test."""

import asyncio
import contextlib
import gzip
import io
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from gateway.settings import Settings
from tests.fakes import websocket_flood
from tests.fakes.shop import Shop
from tests.support.hosted_apps import HOST, Hosting, hosted
from tests.support.polling import wait_until
from tests.support.relays import relayed
from workers.hosting import caddy
from workers.hosting.sites import listen


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosting() -> AsyncIterator[Hosting]:
    with hosted() as hosting:
        async with hosting.served():
            yield hosting


@pytest_asyncio.fixture
async def shop(hosting: Hosting) -> AsyncIterator[Shop]:
    async with running(hosting) as shop:
        yield shop


def running(hosting: Hosting) -> contextlib.AbstractAsyncContextManager[Shop]:
    return Shop().listening(str(socket_of(hosting)))


def socket_of(hosting: Hosting) -> Path:
    """Returns where the app listens, after removing its former socket."""
    path = hosting.releases.running / "dep_1.sock"
    path.unlink(missing_ok=True)
    return path


@pytest_asyncio.fixture
async def visitor(hosting: Hosting) -> AsyncIterator[aiohttp.ClientSession]:
    base, headers = f"http://127.0.0.1:{hosting.port}", {"Host": HOST}
    async with aiohttp.ClientSession(base, headers=headers, auto_decompress=False) as session:
        yield session


async def test_the_app_is_asked_what_the_visitor_asked(hosting: Hosting, shop: Shop) -> None:
    target = "/a%2Fb//..;x/%7e?q=%20&r=a+b"
    sent = ["X-Own: 1", "Cookie: a=1; b=2"]
    told = ["X-Forwarded-For: 192.0.2.7", "X-Forwarded-Proto: https", "X_Forwarded_For: 6.6.6.6"]
    told += ["Forwarded: for=6.6.6.6", "X-Real-IP: 6.6.6.6"]
    said = await hosting.ask(target, *sent, *told, host=f"{HOST}:8080")
    assert (said.status, said.body) == (200, b'{"size": 0}')
    headers = {
        "Host": f"{HOST}:8080",
        "X-Own": "1",
        "Cookie": "a=1; b=2",
        "X-Forwarded-For": "192.0.2.7, 127.0.0.1",
        "X-Forwarded-Host": f"{HOST}:8080",
        "X-Forwarded-Proto": "https",
        "Connection": "close",
    }
    assert [request[:3] for request in shop.seen] == [("GET", target, headers)]
    await hosting.ask("/")
    assert shop.seen[1][2]["X-Forwarded-Proto"] == "http"
    assert shop.seen[1][2]["X-Forwarded-For"] == "127.0.0.1"


async def test_bodies_arrive_whole(hosting: Hosting, shop: Shop, visitor: aiohttp.ClientSession) -> None:
    large, packed = os.urandom(3_000_000), gzip.compress(b"packed")

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 65_536):
            yield large[start : start + 65_536]

    for path in ("/upload", "/.auth/callback"):
        for body in (io.BytesIO(large), parts()):
            async with visitor.post(path, data=body) as answer:
                assert await answer.json() == {"size": len(large)}
    assert [body for *_, body in shop.seen] == [large] * 4
    async with visitor.put("/packed", data=packed, headers={"Content-Encoding": "gzip"}) as answer:
        assert answer.status == 200
    assert shop.seen[-1][3] == packed
    async with visitor.post("/", data=b"x", expect100=True) as answer:
        assert answer.status == 200
    async with visitor.post("/early", data=b"x" * 1_000) as answer:
        assert answer.status == 413
    for method in ("DELETE", "PATCH", "OPTIONS", "PROPFIND"):
        async with visitor.request(method, "/", data=b"ab") as answer:
            assert await answer.json() == {"size": 2}
    async with visitor.head("/") as answer:
        assert (answer.status, answer.headers["Content-Length"]) == (200, "11")


async def test_answers_come_as_the_app_gave_them(hosting: Hosting, shop: Shop, visitor: aiohttp.ClientSession) -> None:
    async with visitor.get("/headers", allow_redirects=False) as answer:
        assert (answer.status, await answer.read()) == (201, b"made")
        assert answer.headers.getall("Set-Cookie") == ["a=1", "b=2"]
        assert answer.headers.getall("Cache-Control") == ["max-age=60"]
        assert (answer.headers["Location"], answer.headers["Content-Type"]) == ("http://apps/x", "text/html")


async def test_events_are_not_held_back(hosting: Hosting, shop: Shop, visitor: aiohttp.ClientSession) -> None:
    async with visitor.get("/events", headers={"Accept-Encoding": "gzip"}) as answer:
        assert await asyncio.wait_for(answer.content.readline(), 10) == b"data: first\n"
        shop.go_on.set()
        assert (await answer.content.read()).endswith(b"data: second\n\n")


async def test_the_app_learns_that_its_visitor_left(
    hosting: Hosting, shop: Shop, visitor: aiohttp.ClientSession
) -> None:
    async with visitor.get("/events") as answer:
        await answer.content.readline()
        answer.close()
    await wait_until(lambda: shop.left == 1)


async def test_sockets(hosting: Hosting, shop: Shop, visitor: aiohttp.ClientSession) -> None:
    async with visitor.ws_connect("/socket", protocols=["other", "chat"], compress=15) as socket:
        assert socket.protocol == "chat"
        await socket.send_str("hello")
        assert await socket.receive_str(timeout=10) == f"hello {HOST}"
        await socket.send_bytes(b"\0" * 100_000)
        assert await socket.receive_bytes(timeout=10) == b"\0" * 100_000
        await socket.send_str("bye")
        await socket.receive(timeout=10)
        assert socket.close_code == 4001
    async with visitor.ws_connect("/socket") as socket:
        await socket.close(code=4002)
    await wait_until(lambda: len(shop.closed_with) == 2)
    assert shop.closed_with[1] == 4002
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await visitor.ws_connect("/no-socket")
    assert refused.value.status == 403


@contextlib.asynccontextmanager
async def flooding(*args: str | int) -> AsyncIterator[None]:
    command, pipe = [sys.executable, websocket_flood.__file__, *map(str, args)], asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
    try:
        assert process.stdout
        assert await process.stdout.readline()
        yield
    finally:
        process.kill()
        await process.communicate()


async def test_a_flood_of_frames_delays_nobody_else(hosting: Hosting) -> None:
    """The app floods the WebSockets of its visitors while another account's page is requested."""
    hosting.publish("dep_2", {"index.html": "a page"}, host="page.apps.test", app_id="page")

    async def measure() -> float:
        worst = 0.0
        for _ in range(20):
            began = time.monotonic()
            assert (await hosting.ask("/", host="page.apps.test")).body == b"a page"
            worst = max(worst, time.monotonic() - began)
        return worst

    async with flooding("app", str(path := socket_of(hosting))):
        path.chmod(0o666)
        control = await measure()
        async with flooding("visitors", hosting.port, HOST, 20):
            assert await measure() < control + 1


async def test_an_app_that_does_not_run(hosting: Hosting) -> None:
    path = socket_of(hosting)
    for left_behind in (False, True):
        if left_behind:  # the socket of an app that has ended
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        said = await hosting.ask("/index.html")
        assert (said.status, said.headers["retry-after"]) == (502, "1")


async def test_requests_wait_while_one_release_ends_and_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """But only so long."""
    monkeypatch.setattr(caddy, "HELD_SECONDS", 2)
    with hosted() as hosting:
        site = hosting.build(hosting.deploy("dep_2"), {"index.html": "-"}, start="any")
        site.hold_requests("dep_2")
        async with hosting.served():
            began = time.monotonic()
            said = await hosting.ask("/")
            assert 2 <= time.monotonic() - began < 4
            assert (said.status, said.headers["retry-after"]) == (502, "1")
            asking = [asyncio.create_task(hosting.ask("/", method=method)) for method in ("GET", "POST")]
            await asyncio.sleep(0.3)
            async with Shop().listening(str(hosting.releases.running / "dep_2.sock")):
                hosting.releases.run(site.release("dep_2"))
                site.swap("dep_2")
                site.release_requests()
                assert [said.status for said in await asyncio.gather(*asking)] == [200, 200]


async def test_readers_that_stop_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an app, and one of a file."""
    monkeypatch.setattr(caddy, "SLOW_SECONDS", 1)
    with hosted() as hosting:
        hosting.publish("dep_8", {"huge.bin": b"x" * 30_000_000}, "huge.apps.test", app_id="huge")
        async with hosting.served(), running(hosting) as shop:
            reader, writer = await asyncio.open_connection("127.0.0.1", hosting.port, limit=1_024)
            writer.write(b"GET /huge.bin HTTP/1.1\r\nHost: huge.apps.test\r\n\r\n")
            await reader.readline()
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.connect(("127.0.0.1", hosting.port))
            connection.sendall(f"GET /endless HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            await wait_until(lambda: shop.endless == 1)
            await wait_until(lambda: shop.left == 1, 10)
            connection.close()
            await asyncio.sleep(1.5)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(30_000_000), 10)
            writer.close()


async def test_an_apps_cookies_are_its_own(hosting: Hosting, shop: Shop, visitor: aiohttp.ClientSession) -> None:
    shop.cookies = [
        "a=1; Domain=apps.test; Path=/",
        "b=2; path=/; DOMAIN = .Apps.Test ;Secure",
        "c=3; Domain=test",
        "d=4; Domain=other.apps.test",
        f"e=5; Domain={HOST}; HttpOnly",
        "f=domain=apps.test; Domain=example.com",
        "g=7; Domain=apps.test; Domain=apps.test.",
    ]
    async with visitor.get("/cookies") as answer:
        assert answer.headers.getall("Set-Cookie") == [
            "a=1; Path=/",
            "b=2; path=/;Secure",
            "c=3",
            "d=4",
            "e=5; HttpOnly",
            "f=domain=apps.test",
            "g=7",
        ]


COOKIE = b"Set-Cookie: a=1; Domain=apps.test; Path=/\r\nX-Robots-Tag: all\r\nServer: app\r\n"
FINAL = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n" + COOKIE + b"\r\nok"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n%b\r\n2\r\nok\r\n0\r\n" + COOKIE + b"\r\n"
)
HOSTILE = {
    "final": FINAL,
    "100": b"HTTP/1.1 100 Continue\r\n" + COOKIE + b"\r\n" + FINAL,
    "103": (b"HTTP/1.1 103 Early Hints\r\n" + COOKIE + b"\r\n") * 3 + FINAL,
    "101": b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n" + COOKIE + b"\r\n",
    "announced trailer": CHUNKED % b"Trailer: Set-Cookie\r\n",
    "error": FINAL.replace(b"200 OK", b"500 No"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_response_sets_a_cookie_for_other_apps(hosting: Hosting, name: str) -> None:
    """Whatever its status, in its head and after its body. The app's relay stands between Caddy and the app."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HOSTILE[name])
        writer.close()
        await writer.wait_closed()

    async with relayed(answer, socket_of(hosting)):
        upgrade = ("Connection: Upgrade", "Upgrade: x") if name == "101" else ("Connection: close",)
        head = "\r\n".join(["GET / HTTP/1.1", f"Host: {HOST}", "TE: trailers", *upgrade, "", ""])
        reader, writer = await asyncio.open_connection("127.0.0.1", hosting.port)
        writer.write(head.encode())
        received = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await writer.wait_closed()
    assert b"domain" not in received.lower(), received
    assert b"server: app" not in received.lower(), received
    assert received.startswith(b"HTTP/1.1 ")
    if name != "101":
        assert b"ok" in received


@pytest.mark.parametrize("trusted", ["private", "off", "192.0.2.0/24 ::1/128"])
async def test_visitors_of_both_families_keep_their_addresses(trusted: str) -> None:
    """Only a trusted proxy may say what the address is."""
    with hosted() as hosting:
        settings = Settings(
            apps_listen="[::]:0", apps_domain="apps.test", data_dir=str(hosting.folder), trusted_proxies=trusted
        )
        server = caddy.Caddy(settings, hosting.folder)
        try:
            await server.start(await listen(settings))
            hosting.port = urlsplit(caddy.read_address(hosting.folder)).port or 0
            async with running(hosting) as shop:
                peers, told = ("127.0.0.1", "::1"), "X-Forwarded-For: 6.6.6.6\r\n"
                for address in peers:
                    reader, writer = await asyncio.open_connection(address, hosting.port)
                    writer.write(f"GET / HTTP/1.1\r\nHost: {HOST}\r\n{told}Connection: close\r\n\r\n".encode())
                    assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200 ")
                    writer.close()
                    await writer.wait_closed()
                told_of = [trusted == "private", trusted != "off"]
                expected = [f"6.6.6.6, {peer}" if told else peer for told, peer in zip(told_of, peers, strict=True)]
                assert [seen[2]["X-Forwarded-For"] for seen in shop.seen] == expected
        finally:
            await server.stop()
