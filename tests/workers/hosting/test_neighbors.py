"""Requests to an app that runs on another host, through the Caddies of both hosts. The app is a server of the test."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest_asyncio
from aiohttp import web

from gateway.settings import Settings
from tests.fakes.shop import Shop
from tests.support.hosted_apps import HOST, Hosting, Said, hosted
from workers.hosting.neighbors import Neighbors, find_address_towards, find_own_address

KEY = "k" * 32


@contextlib.asynccontextmanager
async def served(**settings: str) -> AsyncIterator[Hosting]:
    with hosted() as hosting:
        async with hosting.served(**{"encryption_key": KEY, **settings}):
            yield hosting


def running(hosting: Hosting) -> contextlib.AbstractAsyncContextManager[Shop]:
    return Shop().listening(str(hosting.releases.running / "dep_1.sock"))


def pass_on(hosting: Hosting, to: Hosting | None) -> None:
    address = f"127.0.0.1:{to.port}" if to else ""
    Neighbors(hosting.folder).pass_on(hosting.releases.live_site("shop"), "ab12" if to else "", address)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[Hosting, Hosting]]:
    """Two hosts. The second one runs the app."""
    async with served() as first, served() as second:
        pass_on(first, second)
        yield first, second


async def test_the_app_gets_requests_as_if_they_came_to_its_host(pair: tuple[Hosting, Hosting]) -> None:
    first, second = pair
    async with running(second) as shop:
        target, told = "/a%2Fb//..;x/%7e?q=%20", ["X-Forwarded-For: 192.0.2.7", "X-Forwarded-Proto: https"]
        said = await first.ask(target, "Cookie: a=1", *told, "Capsule-Passed-On: guess", host=f"{HOST}:8080")
        assert (said.status, said.body) == (200, b'{"size": 0}')
        [(method, path, headers, _)] = shop.seen
        assert (method, path, headers["Host"], headers["Cookie"]) == ("GET", target, f"{HOST}:8080", "a=1")
        assert headers["X-Forwarded-For"].startswith("192.0.2.7, 127.0.0.1")
        assert headers["X-Forwarded-Proto"] == "https"
        assert "Capsule-Passed-On" not in headers
        async with aiohttp.ClientSession(f"http://127.0.0.1:{first.port}", headers={"Host": HOST}) as visitor:
            async with visitor.post("/upload", data=b"x" * 300_000) as answer:
                assert await answer.json() == {"size": 300_000}
            async with visitor.get("/events") as answer:
                assert await asyncio.wait_for(answer.content.readline(), 2) == b"data: first\n"
                shop.go_on.set()
            async with visitor.ws_connect("/socket") as connection:
                await connection.send_str("hello")
                assert await connection.receive_str(timeout=2) == f"hello {HOST}"


async def test_a_visitor_s_own_header_is_never_believed(pair: tuple[Hosting, Hosting]) -> None:
    """Only a neighbor may say where a request comes from, and that it was passed on."""
    first, second = pair
    async with running(second) as shop:
        for header in ("guess", "unknown", ""):
            assert (await first.ask("/", f"Capsule-Passed-On: {header}")).status == 200
    assert len(shop.seen) == 3


async def test_a_request_is_passed_on_once(pair: tuple[Hosting, Hosting]) -> None:
    first, second = pair
    pass_on(second, first)
    said = await first.ask("/")
    assert (said.status, said.headers["retry-after"]) == (503, "1")


async def test_without_a_key_a_request_is_passed_on_once_too() -> None:
    async with served(encryption_key="") as first, served(encryption_key="") as second:
        pass_on(first, second)
        pass_on(second, first)
        assert (await first.ask("/")).status == 503
        second.releases.live_site("shop").serve_here()
        async with running(second):
            assert (await first.ask("/")).status == 200


async def test_visitors_wait_or_try_again_while_no_host_runs_the_app(pair: tuple[Hosting, Hosting]) -> None:
    first, second = pair
    pass_on(second, None)
    for host in pair:
        said = await host.ask("/")
        assert (said.status, said.headers["retry-after"]) == (503, "1")
    # The host of the app does not answer.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    Neighbors(first.folder).pass_on(first.releases.live_site("shop"), "ab12", f"127.0.0.1:{port}")
    said = await first.ask("/")
    assert (said.status, said.headers["retry-after"]) == (503, "1")
    # The app is about to run on this host.
    site = second.releases.live_site("shop")
    site.expect_start()
    site.serve_here()
    pass_on(first, second)
    asking = asyncio.create_task(first.ask("/"))
    await asyncio.sleep(0.5)
    assert not asking.done()
    async with running(second):
        assert (await asking).status == 200
    # It has ended, and is not about to run: nobody waits.
    site.end_start()
    assert (await asyncio.wait_for(second.ask("/"), 5)).status == 502


async def test_files_are_served_by_each_host(pair: tuple[Hosting, Hosting]) -> None:
    first, _ = pair
    first.build(first.deploy("dep_2"), {"index.html": "static"}).swap("dep_2")
    assert (await first.ask("/")).body == b"static"


async def test_hosts_with_certificates_speak_tls_to_each_other() -> None:
    """A visitor's address arrives although these hosts trust no proxies, because the sender is a neighbor."""

    async def allow(_: web.BaseRequest) -> web.Response:
        return web.Response()

    gateway = web.ServerRunner(web.Server(allow))
    await gateway.setup()
    await web.TCPSite(gateway, "127.0.0.1", 0).start()
    settings = {"acme": "internal", "upstream": f"127.0.0.1:{gateway.addresses[0][1]}"}
    try:
        async with served(**settings) as first, served(**settings) as second, running(second) as shop:
            pass_on(first, second)
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            reader, writer = await asyncio.open_connection("127.0.0.1", first.port, ssl=context, server_hostname=HOST)
            lines = ["GET / HTTP/1.1", f"Host: {HOST}", "X-Forwarded-For: 6.6.6.6", "Connection: close", "", ""]
            writer.write("\r\n".join(lines).encode())
            said = Said(await reader.read())
            writer.close()
            assert (said.status, said.body) == (200, b'{"size": 0}')
            [(_, _, headers, _)] = shop.seen
            assert (headers["Host"], headers["X-Forwarded-Proto"]) == (HOST, "https")
            assert headers["X-Forwarded-For"] == "127.0.0.1, 127.0.0.1", "of the visitor and the neighbor"
    finally:
        await gateway.cleanup()


def test_an_address_that_changes_replaces_the_one_before(tmp_path: Path) -> None:
    hosting = Hosting(tmp_path)
    site, neighbors = hosting.site(hosting.deploy("dep_1")), Neighbors(tmp_path)
    for address in ("10.0.0.1:80", "[fd00::1]:8080"):
        neighbors.pass_on(site, "ab12", address)
        assert [path.name for path in (site.folder / "owner").iterdir()] == [address]
    for host, address in (("ab12", ""), ("ab12", "../x:1"), ("../x", "10.0.0.1:80"), ("none", "10.0.0.1:80")):
        neighbors.pass_on(site, host, address)
        assert [*(site.folder / "owner").iterdir()] == []
    site.serve_here()
    assert not (site.folder / "owner").exists()


def test_the_own_address(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()

    def find(**settings: str) -> str:
        return find_own_address(Settings(redis_url="redis://:secret@127.0.0.1:6379/0", **settings), tmp_path)

    assert find(apps_listen="10.1.2.3:8080") == "10.1.2.3:8080"
    assert find(apps_listen="0.0.0.0:8080") == "127.0.0.1:8080"
    assert find(apps_listen="[::]:8080") == "127.0.0.1:8080"
    assert find(apps_listen="0.0.0.0:8080", host_address="host.internal:443") == "host.internal:443"
    (tmp_path / "web" / "address").write_text("http://127.0.0.1:4567")
    assert find(apps_listen="127.0.0.1:8080") == "127.0.0.1:4567"
    assert find_address_towards("redis+sentinel://127.0.0.1:1,127.0.0.2:2/gateway") == "127.0.0.1"
    assert find_address_towards("unix:///run/redis.sock") == "127.0.0.1"
