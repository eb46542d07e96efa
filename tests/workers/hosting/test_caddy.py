"""What Caddy answers for the files of releases, its certificates on demand, and the gateway behind it."""

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, quote, urlsplit

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from gateway.accounts.records import App, Domain, replace_domains
from gateway.deploys.addresses import hosts_of
from gateway.settings import Settings
from tests.support.folders import passable_folder
from tests.support.hosted_apps import DOMAIN, HOST, Hosting, Said, swapped_under_load
from tests.support.polling import wait_until
from workers.hosting import caddy
from workers.hosting.driver import HostDriver, HostPlaces
from workers.hosting.host_watch import read_certificate_left

SHOP = App(id="shop", name="shop", account="acc_1", createdAt="2026-07-02T10:00:00.000Z")
FILES: dict[str, str | bytes] = {
    "index.html": "<h1>Shop</h1>",
    "app.js": "let x = 'ü'",
    "docs/index.html": "docs",
    "about.html": "about",
    "a b.txt": "spaced",
    "data.unknown-kind": b"?",
    "trick-index.html": "a file, not a folder's page",
    ".env": "SECRET=1",
    "docs/.git/config": "secret",
    ".well-known/jwks.json": '{"keys":[]}',
    ".well-known/.hidden": "secret",
}
PAGE = {"cache-control": "no-cache", "x-content-type-options": "nosniff", "content-type": "text/html; charset=utf-8"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosting() -> AsyncIterator[Hosting]:
    with passable_folder() as folder:
        hosting = Hosting(folder)
        site = hosting.publish("dep_1", FILES)
        hosting.releases.serve_as("shop.example.com", site)  # its own domain
        hosting.publish("dep_2", {"index.html": "preview"}, "shop-preview.apps.test", kind="preview")
        hosting.publish("dep_3", {"index.html": "branch"}, "shop--p-fix.apps.test", kind="preview", branch="fix")
        (hosting.folder / "outside.txt").write_text("outside")
        async with hosting.served():
            yield hosting
            for log in (folder / "web/caddy.log", folder / "caddy/caddy.log"):
                assert b"Shop" not in log.read_bytes(), "a request may hold a secret"


async def test_each_host_has_its_release(hosting: Hosting) -> None:
    texts = {HOST: "<h1>Shop</h1>", "shop.example.com": "<h1>Shop</h1>", "shop-preview.apps.test": "preview"}
    for host, text in {**texts, "shop--p-fix.apps.test": "branch"}.items():
        for written in (host, f"{host}:8080", host.upper(), f"{host}.", f"{host.title()}.:80"):
            said = await hosting.ask("/", host=written)
            assert said.kept == (200, text.encode(), PAGE), written
            assert "server" not in said.headers
            is_preview = text in ("preview", "branch")
            assert said.headers.get("x-robots-tag") == ("noindex" if is_preview else None)


FOLDERS = ("100% dir", "what? dir", "c# dir", "a dir", "%41", "ü", "x&y;z", "[a]*{b}", '"q"')


async def test_an_address_has_one_spelling(hosting: Hosting) -> None:
    """The other one, with or without the slash at the end, leads there, whatever the name is."""
    files = {f"{name}/index.html": f"folder {name}" for name in FOLDERS}
    files |= {f"page {name}.html": f"page {name}" for name in FOLDERS}
    files |= {"index.html": "home", "A/index.html": "folder A", "both.html": "page", "both/index.html": "folder"}
    files |= {"deep/er.html": "deeper", "plain": "plain", "404.html": "nothing here"}
    hosting.publish("dep_14", files, "slashes.apps.test", app_id="slashes")

    async def follow(path: str) -> tuple[int, str, str]:
        said = await hosting.ask(path, "Accept: text/html", host="slashes.apps.test")
        location = said.headers.get("location", "")
        if said.status == 308:
            assert said.headers["cache-control"] == "no-cache"
            said = await hosting.ask(location, host="slashes.apps.test")
        return said.status, location, said.body.decode()

    for name in FOLDERS:
        folder, page = f"/{quote(name)}", f"/{quote(f'page {name}')}"
        assert await follow(f"{folder}/?q=%3F") == (200, "", f"folder {name}")
        status, location, body = await follow(f"{folder}?q=%3F/")
        assert (status, location.endswith("/?q=%3F/"), body) == (200, True, f"folder {name}"), location
        assert await follow(page) == (200, "", f"page {name}")
        status, location, body = await follow(f"{page}/?q")
        assert (status, location.endswith("?q"), body) == (200, True, f"page {name}"), location
    for path, status, location, body in [
        ("/both/", 200, "/both", "page"),
        ("/deep/er/", 200, "/deep/er", "deeper"),
        ("/deep%2Fer%2F", 200, "/deep%2Fer", "deeper"),
        ("//evil.example/../both/", 200, "/evil.example/../both", "page"),
        ("/%5Cevil.example/../both/", 200, "/%5Cevil.example/../both", "page"),
        ("/plain/", 404, "", "nothing here"),
        ("/deep", 404, "", "nothing here"),
    ]:
        assert (path, await follow(path)) == (path, (status, location, body))


async def test_visits_of_previews_are_noted_and_nothing_else(hosting: Hosting) -> None:
    driver = HostDriver(Settings(data_dir=str(hosting.folder), apps_domain="apps.test"))
    await driver.read_visits()  # of the other tests
    began = time.time()
    for host in (HOST, "Shop--p-Fix.apps.test.:80", "none.apps.test"):
        await hosting.ask("/?token=secret", "Cookie: session=secret", host=host)
    [(place, at)] = (await wait_until(driver.read_visits)).items()
    assert place == ("acc_1", "shop", "p-fix")
    assert began - 1 < at < time.time() + 1
    assert await driver.read_visits() == {}
    written = (hosting.folder / "caddy/previews.log").read_text()
    assert not [word for word in ("secret", "token", "session", "127.0.0.1", HOST) if word in written]


STATIC = {
    "index.html": "home",
    "404.html": "nothing here",
    "docs/404.html": "no such document",
    "docs/index.html": "docs",
    "docs/old/a.html": "a",
}


async def test_an_app_has_error_pages_of_its_own(hosting: Hosting) -> None:
    """The nearest one upwards counts, and unknown paths are no routes of a page's script then."""
    hosting.publish("dep_10", STATIC, "pages.apps.test", app_id="pages")
    for path, text in {
        "/none": "nothing here",
        "/docs/none": "no such document",
        "/docs/old/deeper/none.css": "no such document",
        "/a/b/c/d/e/f/g/h/i/j/k": "nothing here",
        "/docs/%2e%2e/none": "nothing here",
    }.items():
        said = await hosting.ask(path, "Accept: text/html", host="pages.apps.test")
        assert (said.status, said.body.decode()) == (404, text), path
        assert said.headers["content-type"] == "text/html; charset=utf-8"
        assert said.headers["cache-control"] == "no-cache"
    # A fallback answers for every unknown path.
    hosting.publish("dep_11", {**STATIC, "200.html": "app"}, "single.apps.test", app_id="single")
    for path, text in {"/none/deep/path.js": "app", "/docs/none": "app", "/docs/old/a": "a"}.items():
        said = await hosting.ask(path, host="single.apps.test")
        assert (said.status, said.body.decode()) == (200, text), path


TYPES = """
rss application/rss+xml; charset=utf-8 | ics text/calendar; charset=utf-8 | JSON application/json; charset=utf-8
toml application/toml; charset=utf-8 | yml application/yaml; charset=utf-8 | gltf model/gltf+json; charset=utf-8
mjs text/javascript; charset=utf-8 | svg image/svg+xml; charset=utf-8 | xml text/xml; charset=utf-8
log text/plain; charset=utf-8 | woff2 font/woff2 | m4a audio/mp4 | glb model/gltf-binary | Jpg image/jpeg
wasm application/wasm | webmanifest application/manifest+json; charset=utf-8 | bin application/octet-stream
"""


async def test_each_ending_has_its_type(hosting: Hosting) -> None:
    expected = dict(each.split(maxsplit=1) for each in TYPES.strip().replace("\n", " | ").split(" | "))
    files = {"index.html": "home", "LICENSE": "free", **{f"a.{ending}": "content" for ending in expected}}
    hosting.publish("dep_15", files, "types.apps.test", app_id="types")
    for ending, kind in expected.items():
        said = await hosting.ask(f"/a.{ending}", host="types.apps.test")
        assert (ending, said.status, said.headers["content-type"]) == (ending, 200, kind)
    assert (await hosting.ask("/LICENSE", host="types.apps.test")).headers["content-type"] == "application/octet-stream"


OTHER_HOSTS = """
apps.test|127.0.0.1|[::1]:80|shop..apps.test|.|..|../releases|current|*|-|shop.apps.test/../x|shop.apps.test@evil|ünicode
|.shop.apps.test.new
"""


async def test_other_hosts_have_none(hosting: Hosting) -> None:
    for host in (None, "", "a" * 300, *OTHER_HOSTS.replace("\n", "").split("|")):
        said = await hosting.ask("/", host=host)
        assert said.status in (400, 404), host
        assert b"Shop" not in said.body
        assert (await hosting.ask("/")).status == 200


async def test_a_host_without_a_release_has_nothing(hosting: Hosting) -> None:
    """A browser gets a page that says so."""
    site = hosting.publish("dep_9", {"index.html": "first"}, "empty.apps.test", app_id="empty")
    assert (await hosting.ask("/", host="empty.apps.test")).status == 200
    site.undo("dep_9")
    target = "/deep/page.html?x=<script>"
    for host in ("empty.apps.test", "nobody.apps.test", "x" * 64 + ".apps.test"):
        said = await hosting.ask(target, "Accept: text/html,*/*;q=0.8", host=host)
        assert (said.status, said.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert b"<h1>There is no app at this address</h1>" in said.body
        assert b"$" not in said.body
        assert b"script" not in said.body
        said = await hosting.ask(target, "Accept: */*", host=host)
        assert (said.status, said.body) == (404, b"There is no app at this address.\n")
    site.mark_unpublished()
    said = await hosting.ask("/", host="empty.apps.test")
    assert (said.status, said.body) == (404, b"This app has not been published yet.\n")
    said = await hosting.ask("/", "Accept: text/html", host="empty.apps.test")
    assert (said.status, said.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert b"<h1>This app has not been published yet</h1>" in said.body


# target, headers, status, body, kept headers that matter
ANSWERS: list[tuple[str, tuple[str, ...], int, bytes, dict[str, str]]] = [
    ("/index.html?x=1", (), 200, b"<h1>Shop</h1>", PAGE),
    ("/some/v1.2", ("Accept: text/html",), 200, b"<h1>Shop</h1>", PAGE),
    ("//docs///index.html", (), 200, b"docs", PAGE),
    ("/docs?a=b", (), 308, b"", {"cache-control": "no-cache", "location": "/docs/?a=b"}),
    ("/about/?a=b", (), 308, b"", {"cache-control": "no-cache", "location": "/about?a=b"}),
    ("/trick-", (), 200, b"<h1>Shop</h1>", PAGE),
    ("/%61pp%2Ejs", (), 200, "let x = 'ü'".encode(), {**PAGE, "content-type": "text/javascript; charset=utf-8"}),
    ("/a%20b.txt", (), 200, b"spaced", {**PAGE, "content-type": "text/plain; charset=utf-8"}),
    ("/data.unknown-kind", (), 200, b"?", {**PAGE, "content-type": "application/octet-stream"}),
    ("/.well-known/jwks.json", (), 200, b'{"keys":[]}', {**PAGE, "content-type": "application/json; charset=utf-8"}),
    ("/index.html", ("Range: bytes=4-7",), 206, b"Shop", {**PAGE, "content-range": "bytes 4-7/13"}),
]


@pytest.mark.parametrize(("target", "headers", "status", "body", "kept"), ANSWERS)
async def test_paths(
    hosting: Hosting, target: str, headers: tuple[str, ...], status: int, body: bytes, kept: dict[str, str]
) -> None:
    said = await hosting.ask(target, *headers)
    assert said.kept == (status, body, kept)
    assert len(said.names) == len(set(said.names)), "a header twice"
    head = await hosting.ask(target, *headers, method="HEAD")
    assert (head.status, head.body, head.headers.get("content-type")) == (status, b"", kept.get("content-type"))
    assert head.headers.get("content-length") in (None, said.headers["content-length"])


@pytest.mark.parametrize(
    ("target", "accept", "status"),
    [
        ("/none", "text/html,*/*;q=0.8", 200),
        ("/none/", "*/*", 200),
        ("/none", "application/json", 404),
        ("/none", "image/avif,image/*", 404),
        ("/none.png", "text/html,*/*;q=0.8", 404),
        ("/none.mp4", "*/*", 404),
    ],
)
async def test_a_route_of_the_page_has_no_extension_and_is_asked_for_as_a_page(
    hosting: Hosting, target: str, accept: str, status: int
) -> None:
    said = await hosting.ask(target, f"Accept: {accept}")
    assert (said.status, said.body) == (status, b"<h1>Shop</h1>" if status == 200 else b"Not Found\n")


REFUSED = """
/missing.js /app.js/ /.env /%2eenv /%2Eenv /docs/.git/config /docs/%2egit/config /.well-known/.hidden /../outside.txt
/%2e%2e/outside.txt /..%2f..%2f..%2foutside.txt /docs/..%2f..%2f..%2f..%2foutside.txt /..\\outside.txt
/%5c..%5coutside.txt /%252e%252e/outside.txt /.. /%00 /app.js%00.html /%ff.js /dep_1/files/app.js /../dep_1/files/.env
//../.env /./.env /docs/../.env /. /.%2e/.env /ü.js
"""


async def test_refused(hosting: Hosting) -> None:
    for target in (*REFUSED.split(), f"/{'a' * 300}.js", "/a.js/" * 500):
        said = await hosting.ask(target)
        # What stays inside is shortened, as browsers do.
        assert said.status in (400, 404) or (said.status, said.body) == (200, b"<h1>Shop</h1>"), target
        assert not any(secret in said.body for secret in (b"SECRET", b"secret", b"outside")), target
        assert (await hosting.ask(target, method="HEAD")).status == said.status, target
    assert (await hosting.ask("/")).status == 200


async def test_only_reading(hosting: Hosting) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        for target in ("/app.js", "/", "/some/route"):
            said = await hosting.ask(target, "Content-Length: 0", method=method)
            assert (said.status, said.headers["allow"]) == (405, "GET, HEAD"), (method, target)


async def test_a_browser_asks_whether_its_copy_is_the_present_one(hosting: Hosting) -> None:
    for target in ("/app.js", "/some/route"):
        first = await hosting.ask(target)
        for condition in (
            f"If-None-Match: {first.headers['etag']}",
            f"If-Modified-Since: {first.headers['last-modified']}",
        ):
            said = await hosting.ask(target, condition)
            assert (said.status, said.body) == (304, b"")
        assert (await hosting.ask(target, 'If-None-Match: "other"')).status == 200


async def test_a_page_from_before_a_swap_finds_its_scripts(hosting: Hosting) -> None:
    which = {"app_id": f"swap{hosting.port}", "host": "swap.apps.test"}
    hosting.publish("dep_1", {"index.html": "one", "one.js": "1", "old.html": "old"}, **which)
    site = hosting.publish("dep_2", {"index.html": "two"}, **which)
    host = "swap.apps.test"
    assert (await hosting.ask("/", host=host)).body == b"two"
    assert (await hosting.ask("/one.js", host=host)).body == b"1"
    assert (await hosting.ask("/old.html", host=host)).status == 404, "a page comes from the current release alone"
    site.forget_recent()
    assert (await hosting.ask("/one.js", host=host)).body == b"1"
    an_hour_ago = os.stat(site.folder).st_mtime - 3_600
    os.utime(site.folder / "current", (an_hour_ago, an_hour_ago), follow_symlinks=False)
    site.forget_recent()
    assert (await hosting.ask("/one.js", host=host)).status == 404
    site.undo("dep_2")
    assert (await hosting.ask("/", host=host)).body == b"one"


async def test_nothing_fails_while_releases_are_swapped(hosting: Hosting) -> None:
    """Pages still request a file of the first release that the second does not have."""
    texts = {"dep_1": "one " * 500, "dep_2": "two " * 700}
    for deploy, text in texts.items():
        files = {"index.html": text, f"{deploy}.js": text, "both.js": text}
        site = hosting.publish(deploy, files, "busy.apps.test", app_id="busy")
    paths = ["/", "/both.js", "/some/route", "/dep_1.js"]
    await swapped_under_load(hosting, site, ("dep_1", "dep_2"), paths, set(texts.values()), swaps=10)


async def test_the_other_domains_of_an_app_redirect_to_the_primary_one(hosting: Hosting) -> None:
    names = apex, www, emoji = "example.org", "www.example.org", "xn--e28h.example.org"
    domains = [Domain(name, verified=True) for name in names]
    app = replace_domains(msgspec.structs.replace(SHOP, id="named", name="named"), domains)
    own, places = f"named.{DOMAIN}", HostPlaces(Settings(apps_url="https://{host}"), hosting.releases)
    site = hosting.publish("dep_1", {"index.html": "shop"}, own, app_id="named")
    for place in await places.list_places("named"):
        await places.rename(place, hosts_of(app, "live", DOMAIN))
    [place] = await places.list_places("named")
    assert place.hosts == {own: "", apex: "", www: apex, emoji: apex}
    for path, kept in {
        "/none?": "/none?",
        "/a%20b/%2F/%C3%BC.html?q=%26&q=a+b&next=//a.example": "/a%20b/%2F/%C3%BC.html?q=%26&q=a+b&next=//a.example",
        "/{http.request.host}/{{.Host}}?{{now}}": "/%7Bhttp.request.host%7D/%7B%7B.Host%7D%7D?{{now}}",
        "/\xc3\xbc?q=\xc3\xbc": "/%C3%BC?q=\xc3\xbc",
        "/.well-known/x": "/.well-known/x",
    }.items():
        for host in (www, emoji, www.upper(), f"{www}.", f"{www}:8443"):
            said = await hosting.ask(path, host=host)
            assert (said.status, said.body) == (308, b""), host
            assert said.headers["location"] == f"https://{apex}{kept}", host
            assert said.headers["cache-control"] == "no-cache", "the primary may change"
    for host in (own, apex):
        assert (await hosting.ask("/", host=host)).body == b"shop"
    assert (await hosting.ask("/", host=www, method="POST")).status == 405, "the app's own answer"
    site.set_suspended(suspended=True)
    assert (await hosting.ask("/", host=www)).status == 503, "a suspended app redirects nobody"


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://shop.apps.test/ HTTP/1.1\r\nHost: shop.apps.test\r\n\r\n",
        b"GET http://shop-preview.apps.test/ HTTP/1.1\r\nHost: shop.apps.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: shop.apps.test\r\nHost: shop-preview.apps.test\r\n\r\n",
        b"CONNECT shop.apps.test:443 HTTP/1.1\r\nHost: shop.apps.test:443\r\n\r\n",
        b"GET @evil/ HTTP/1.1\r\nHost: shop.apps.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: shop.apps.test\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
    ids=range(6),
)
async def test_no_head_crashes_it(hosting: Hosting, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hosting.port)
    writer.write(head)
    answer = b""
    async with asyncio.timeout(10):
        with suppress(OSError):  # a head that is too long is not read to its end
            writer.write_eof()
            answer = await reader.read()
    writer.transport.abort()
    assert b"Shop" not in answer
    assert b"preview" not in answer
    if answer.startswith(b"HTTP/1."):
        assert 400 <= int(answer.split(b" ")[1]) < 506, answer[:200]
    assert (await hosting.ask("/")).status == 200


async def test_files_are_read_by_a_user_of_its_own(hosting: Hosting) -> None:
    """A file that other users cannot read is not served, although the worker may be root."""
    pages, deploy = {"index.html": "home", "mine.txt": "for its owner"}, f"dep_{secrets.token_hex(4)}"
    site = hosting.publish(deploy, pages, "modes.apps.test", kind="preview", branch="modes")
    (site.release(deploy) / "files/mine.txt").chmod(0o600)
    said = await hosting.ask("/mine.txt", host="modes.apps.test")
    assert said.status == (404 if os.geteuid() == 0 else 200)
    assert (await hosting.ask("/", host="modes.apps.test")).body == b"home"


async def test_an_old_caddy_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "caddy"
    program.write_text("#!/bin/sh\necho v2.6.2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(caddy.NoCaddy, match=r"is Caddy v2\.6\.2; install Caddy 2\.11 or newer"):
        await caddy.Caddy(Settings(), tmp_path).start(socket.create_server(("127.0.0.1", 0)))
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(caddy.NoCaddy, match="is not installed"):
        caddy.find_binary()


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
    async def served(self, hosting: Hosting, *, acme: str = "internal") -> AsyncIterator[Self]:
        """Without `acme`, the gateway listens at a Unix socket."""
        path = hosting.folder / "gateway.sock"
        await self.runner.setup()
        try:
            if acme:
                await web.TCPSite(self.runner, "127.0.0.1", 0).start()
                address = "{}:{}".format(*self.runner.addresses[0][:2])
            else:
                await web.UnixSite(self.runner, path).start()
                path.chmod(0o666)
                address = f"unix/{path}"
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


async def test_the_gateway_is_served_beside_the_apps(secured: tuple[Hosting, FakeGateway]) -> None:
    hosting, gateway = secured
    for path in FRONTED:
        assert (await ask(hosting, API, path)).status == 404
    assert gateway.seen == []
    async with connected(hosting, API) as (reader, writer):
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
