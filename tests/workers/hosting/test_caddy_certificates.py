"""Certificates on demand, and the gateway behind the Caddy that serves the apps."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Self
from urllib.parse import parse_qs, urlsplit

import pytest
import pytest_asyncio
from aiohttp import web

from gateway.settings import Settings
from tests.support.folders import passable_folder
from tests.support.hosted_apps import DOMAIN, HOST, Hosting, Said
from tests.support.polling import wait_until
from workers.hosting.driver import HostPlaces
from workers.hosting.host_watch import read_certificate_left

FORWARDING = {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"}
API = "api.example.com"
FRONTED = ("/metrics", "/health", "/ready", "/platform/tls/allow?domain=shop.apps.test")


class FakeGateway:
    """Allows certificates for two names, and streams. Caddy serves it and the apps, with certificates by default."""

    def __init__(self) -> None:
        self.allowed, self.asked, self.seen, self.left = {HOST, API}, list[str](), list[str](), 0
        self.go_on = asyncio.Event()
        self.runner = web.ServerRunner(web.Server(self.answer, handler_cancellation=True), shutdown_timeout=0.1)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/platform/tls/allow" and request.headers["Host"] != API:
            assert not FORWARDING & {name.lower() for name in request.headers}, "the gateway would refuse it"
            name = parse_qs(urlsplit(request.raw_path).query)["domain"][0]
            self.asked.append(name)
            return web.Response(status=200 if name in self.allowed else 404)
        self.seen.append(request.raw_path)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: first\n\n")
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        return response

    @contextlib.asynccontextmanager
    async def served(self, hosting: Hosting, *, at_socket: bool = False, acme: str = "internal") -> AsyncIterator[Self]:
        path = hosting.folder / "gateway.sock"
        await self.runner.setup()
        try:
            if at_socket:
                await web.UnixSite(self.runner, path).start()
                path.chmod(0o666)
                address = f"unix/{path}"
            else:
                await web.TCPSite(self.runner, "127.0.0.1", 0).start()
                address = "{}:{}".format(*self.runner.addresses[0][:2])
            url = f"{'https' if acme else 'http'}://{API}"
            async with hosting.served(acme=acme, base_url=url, upstream=address):
                yield self
        finally:
            await self.stop()

    async def stop(self) -> None:
        self.go_on.set()
        await self.runner.cleanup()


@pytest.fixture
def folder() -> Iterator[Hosting]:
    with passable_folder() as folder:
        hosting = Hosting(folder)
        hosting.publish("dep_1", {"index.html": "shop"})
        yield hosting


@pytest_asyncio.fixture
async def secured(folder: Hosting) -> AsyncIterator[tuple[Hosting, FakeGateway]]:
    async with FakeGateway().served(folder) as gateway:
        yield folder, gateway


@contextlib.asynccontextmanager
async def connected(
    hosting: Hosting, name: str, protocol: str = "http/1.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connects with TLS and trusts only Caddy's own authority."""
    root = hosting.folder / "caddy/pki/authorities/local/root.crt"
    await wait_until(root.exists)
    context = ssl.create_default_context(cafile=root)
    context.set_alpn_protocols([protocol])
    reader, writer = await asyncio.open_connection("127.0.0.1", hosting.port, ssl=context, server_hostname=name)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ask(hosting: Hosting, name: str, path: str = "/", host: str = "") -> Said:
    async with connected(hosting, name) as (reader, writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host or name}\r\nConnection: close\r\n\r\n".encode())
        return Said(await asyncio.wait_for(reader.read(), 10))


async def test_a_served_name_gets_a_certificate_and_no_other(secured: tuple[Hosting, FakeGateway]) -> None:
    """A connection for one name asks for no other."""
    hosting, gateway = secured
    assert (await ask(hosting, HOST)).body == b"shop"
    async with connected(hosting, HOST, "h2") as (_, writer):
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
    assert gateway.asked == [HOST]
    for name in ("unknown.apps.test", "evil.example.com"):
        with pytest.raises(OSError):
            await ask(hosting, name)
        assert gateway.asked.pop() == name
    hosting.publish("dep_2", {"index.html": "other"}, "other.apps.test", app_id="other")
    gateway.allowed.add("other.apps.test")
    for other in ("other.apps.test", API):
        said = await ask(hosting, HOST, host=other)
        assert (said.status, b"other" in said.body) == (421, False)
    assert gateway.seen == []
    assert 0.9 < (await read_certificate_left(hosting.folder, API) or 0) <= 1
    assert await read_certificate_left(hosting.folder, "unknown.apps.test") is None


async def test_each_domain_of_an_app_has_a_certificate(secured: tuple[Hosting, FakeGateway]) -> None:
    """One that redirects needs it, too: the browser checks it before it follows."""
    hosting, gateway = secured
    names = ("example.org", "www.example.org", "xn--e28h.example.org")
    gateway.allowed.update(names)
    settings = Settings(apps_domain=DOMAIN, acme="internal", apps_url="https://{host}")
    places = HostPlaces(settings, hosting.releases)
    [place] = await places.list_places("shop")
    await places.rename(place, {HOST: "", names[0]: "", **dict.fromkeys(names[1:], names[0])})
    assert (await ask(hosting, names[0])).body == b"shop"
    for name in names[1:]:
        said = await ask(hosting, name, "/a%20b?c=%C3%BC")
        assert (said.status, said.headers["location"]) == (308, "https://example.org/a%20b?c=%C3%BC")
    assert gateway.asked == [*names]
    # A redirect for another name than the connection's is refused as everything is.
    assert (await ask(hosting, HOST, host=names[1])).status == 421


async def test_without_the_gateway_only_names_with_a_certificate_are_served(
    secured: tuple[Hosting, FakeGateway],
) -> None:
    hosting, gateway = secured
    assert (await ask(hosting, HOST)).status == 200
    await gateway.stop()
    assert (await ask(hosting, HOST)).body == b"shop"
    with pytest.raises(OSError):
        await ask(hosting, API)


@pytest.mark.parametrize("at_socket", [False, True], ids=["port", "unix"])
async def test_the_gateway_is_served_beside_the_apps(folder: Hosting, at_socket: bool) -> None:
    async with FakeGateway().served(folder, at_socket=at_socket) as gateway:
        for path in FRONTED:
            assert (await ask(folder, API, path)).status == 404
        assert gateway.seen == []
        async with connected(folder, API) as (reader, writer):
            writer.write(f"GET /capsule/demo/ai?x=%2F HTTP/1.1\r\nHost: {API}\r\n\r\n".encode())
            assert await asyncio.wait_for(reader.readuntil(b"data: first\n"), 5), "streams are not held back"
        await wait_until(lambda: gateway.left == 1, 5)
        assert gateway.seen == ["/capsule/demo/ai?x=%2F"]


async def test_without_certificates_it_speaks_plain_http(folder: Hosting) -> None:
    async with FakeGateway().served(folder, acme="") as gateway:
        gateway.go_on.set()
        assert (await folder.ask("/", host=API)).status == 200
        assert [(await folder.ask(path, host=API)).status for path in FRONTED] == [404] * 4
        assert (await folder.ask("/")).body == b"shop"
