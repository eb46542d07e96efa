"""The containers of an app's pod, as processes of this machine: they answer what a single machine answers."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.support.folders import passable_folder
from tests.support.hosted_apps import HOST, Hosting, Said
from tests.support.processes import list_children
from tests.support.redis_servers import free_port
from workers.engine.app_data import AppData
from workers.hosting.archives import pack
from workers.hosting.releases import PREVIOUS_SECONDS, replace_link
from workers.kubernetes import pod_relay
from workers.kubernetes.pod import PodRelease
from workers.kubernetes.receive import receive
from workers.sandbox.keeper import STOPPED_STATUS, _read_memory, listen_for_visitors
from workers.sandbox.relay import Relay

TOKEN = "t" * 32
FILES: dict[str, str | bytes] = {
    "index.html": "<h1>Shop</h1>",
    "404.html": "nothing here",
    "about.html": "about",
    "docs/index.html": "docs",
    "assets/app-GpEN3EET.js": "let x = 'ü'" + " " * 2_000,
    "photo.PNG": b"\x89PNG",
    ".env": "SECRET=1",
    ".well-known/jwks.json": '{"keys":[]}',
}
PATHS = (
    "/",
    "/about",
    "/about/?a=b",
    "/docs",
    "/docs/",
    "/none",
    "/none.css",
    "/photo.PNG",
    "/.env",
    "/.well-known/jwks.json",
    "/a%00b",
)
SERVER = """
import http.server, os, sys
TRAILERS = (
    b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\nTrailer: Set-Cookie\\r\\n\\r\\n"
    b"4\\r\\nbody\\r\\n0\\r\\nSet-Cookie: a=b; Domain=apps.test\\r\\n\\r\\n"
)
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/crash": os._exit(3)
        if self.path == "/cut": return self.connection.close()
        if self.path == "/trailers": return self.wfile.write(TRAILERS)
        self.send_response(200)
        self.send_header("Set-Cookie", "a=b; Domain=apps.test; Path=/")
        said = f"{os.environ['APP_URL']} {os.environ['GREETING']} {self.headers['X-Forwarded-For']} ".encode()
        said += open("/proc/self/oom_score_adj", "rb").read().strip()
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
    def log_message(self, *_): print("asked, with", os.environ["GREETING"], flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


class Pod:
    """The folder of a pod, and its containers."""

    def __init__(self, folder: Path, release: PodRelease, archive: Path) -> None:
        self.folder, self.release, self.archive = folder, release, archive
        self.port, self.app_port, self.relay_port = free_port(), free_port(), free_port()

    async def fill(self, previous: Path | None = None, previous_digest: str = "") -> None:
        """Sends the release to the container that waits for it, and before it the archive of the previous one."""
        port = free_port()
        receiving = asyncio.create_task(receive(self.release, TOKEN, folder=self.folder, port=port, host="127.0.0.1"))
        if previous is not None:
            path, body = f"/previous/dep_0?digest={previous_digest}", previous.read_bytes()
            assert await put(port, "wrong", body, path) == 401
            assert await put(port, TOKEN, body[:-1] + b"?", path) == 409
            assert [await put(port, TOKEN, body, path) for _ in range(2)] == [204, 204]
        assert [await put(port, "wrong", self.archive.read_bytes()), await put(port, TOKEN, b"short")] == [401, 409]
        damaged = self.archive.read_bytes()[:-1] + b"?"
        assert [await put(port, TOKEN, damaged), await put(port, TOKEN, self.archive.read_bytes())] == [409, 204]
        async with asyncio.timeout(10):
            await receiving
            await receive(self.release, TOKEN, folder=self.folder, port=port)  # a restart waits for nothing

    @contextlib.asynccontextmanager
    async def container(self, call: str) -> AsyncIterator[asyncio.subprocess.Process]:
        text = (
            "import os, msgspec, pathlib; from workers.kubernetes import data_pod, pod, serve, start;"
            "r = msgspec.json.decode(os.environ['CAPSULE_POD'], type=pod.PodRelease);"
            f"folder = pathlib.Path({str(self.folder)!r}); {call}"
        )
        environment = {**os.environ, "CAPSULE_POD": msgspec.json.encode(self.release).decode()}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", text, env=environment, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[asyncio.subprocess.Process]:
        ports = f"port={self.port}, host='127.0.0.1', app_port={self.app_port}, relay_port={self.relay_port}"
        call = f"serve.serve(r, folder=folder, {ports})"
        async with self.container(call) as process:
            await self.until(200)
            yield process

    async def until(self, status: int) -> None:
        async with asyncio.timeout(30):
            while (await self.ask("/")).status != status:
                await asyncio.sleep(0.05)

    async def ask(self, path: str, host: str = HOST) -> Said:
        hosting = object.__new__(Hosting)
        hosting.port = self.port
        try:
            return await hosting.ask(path, "Accept: text/html", "Accept-Encoding: gzip", host=host)
        except OSError:
            return Said(b"")


async def say_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
    writer.close()


async def put(port: int, token: str, body: bytes, path: str = "/release") -> int:
    url, headers = f"http://127.0.0.1:{port}{path}", {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as client, asyncio.timeout(10):
        while True:
            try:
                async with client.put(url, data=body, headers=headers) as answer:
                    return answer.status
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.05)


async def make_pod(
    hosting: Hosting,
    files: dict[str, str | bytes],
    *,
    previous: dict[str, str | bytes] | None = None,
    **more: object,
) -> Pod:
    folder = hosting.folder.parent
    deploy = hosting.deploy("dep_1", kind="preview" if more.get("address") == "preview" else "live")
    start = str(more.pop("start")) if "start" in more else None
    site = hosting.build(deploy, files, start)
    archive = await pack(site.release("dep_1"), folder / "archive")
    values = {"address": "live", "url": f"https://{HOST}", "runs": start is not None, **more}
    release = msgspec.convert(
        {"account": "acc_1", "app": "shop", "deploy": "dep_1", "archive": archive, **values},
        PodRelease,
        from_attributes=True,
    )
    pod = Pod(folder / "pod", release, folder / "archive")
    if previous is None:
        await pod.fill()
    else:
        hosting.build(hosting.deploy("dep_0"), previous, None)
        packed = await pack(site.release("dep_0"), folder / "previous")
        await pod.fill(folder / "previous", packed.digest)
    return pod


async def assert_same(hosting: Hosting, pod: Pod, path: str) -> None:
    from_host = await hosting.ask(path, "Accept: text/html", "Accept-Encoding: gzip")
    from_pod = await pod.ask(path)
    for each in (from_host, from_pod):
        for name in ("date", "last-modified", "etag"):  # of the time at which the file was unpacked
            each.headers.pop(name, None)
    assert from_pod.status, "it closed the connection"
    assert (from_pod.status, from_pod.body, from_pod.headers) == (
        from_host.status,
        from_host.body,
        from_host.headers,
    ), path


@contextlib.asynccontextmanager
async def single_machine(hosting: Hosting, pod: Pod) -> AsyncIterator[None]:
    """Serves the release as a single machine does, with the same process as its app."""
    site = hosting.site(hosting.deploy("dep_1"))
    hosting.releases.run(site.release("dep_1"))
    site.swap("dep_1")
    hosting.releases.serve_as(HOST, site)
    with listen_for_visitors(str(hosting.releases.running / "dep_1.sock")) as listener:
        relay = Relay(listener, pod.app_port)
        relay.begin()
        async with hosting.served():
            yield
        relay.pause()


@pytest.fixture
def hosting() -> Iterator[Hosting]:
    """Builds releases. Pods are beside it."""
    with passable_folder() as folder:
        yield Hosting(folder / "host")


@pytest.mark.parametrize("address", ["live", "preview"])
async def test_a_pod_answers_as_a_single_machine_does(hosting: Hosting, address: str) -> None:
    pod = await make_pod(hosting, FILES, address=address)
    site = hosting.site(hosting.deploy("dep_1", kind="live" if address == "live" else "preview"))
    site.swap("dep_1")
    hosting.releases.serve_as(HOST, site)
    async with hosting.served(), pod.serving():
        for path in (*PATHS, "/assets/app-GpEN3EET.js"):
            await assert_same(hosting, pod, path)
        assert (await pod.ask("/", host="renamed.apps.test")).body == b"<h1>Shop</h1>"


async def test_other_domains_lead_to_the_primary_one(hosting: Hosting) -> None:
    """As the Secret says that is mounted into the pod. The cluster replaces its files by renaming a link."""
    pod = await make_pod(hosting, FILES)
    mounted = pod.folder / "redirects"

    def mount(version: str, **redirects: str) -> None:
        (mounted / version).mkdir()
        for host, url in redirects.items():
            (mounted / version / host).write_text(url)
            if not (mounted / host).is_symlink():
                (mounted / host).symlink_to(f"..data/{host}")
        replace_link(mounted / "..data", version)

    async with pod.serving():
        assert (await pod.ask("/about", host="www.example.org")).body == b"about"
        mount("..1", **{"www.example.org": "https://example.org"})
        said = await pod.ask("/about?a=%20b", host="www.example.org")
        assert (said.status, said.headers["location"]) == (308, "https://example.org/about?a=%20b")
        assert (await pod.ask("/about", host="example.org")).body == b"about"
        mount("..2", **{"example.org": "https://www.example.org"})
        assert (await pod.ask("/about", host="www.example.org")).body == b"about"
        assert (await pod.ask("/", host="example.org")).headers["location"] == "https://www.example.org/"


async def test_a_page_from_before_the_swap_finds_its_scripts_for_a_while(hosting: Hosting) -> None:
    previous: dict[str, str | bytes] = {"index.html": "before", "before.js": "1", "old.html": "old"}
    pod = await make_pod(hosting, FILES, previous=previous)
    async with pod.serving():
        assert (await pod.ask("/")).body == b"<h1>Shop</h1>"
        assert (await pod.ask("/before.js")).body == b"1"
        assert (await pod.ask("/old.html")).status == 404, "a page comes from the current release alone"
    left = sorted(path.name for path in (pod.folder / "releases/shop/live/dep_0").iterdir())
    assert left == ["files"], "what no page loads takes no room"
    current = pod.folder / "releases/shop/live/current"
    nearly = current.lstat().st_mtime - PREVIOUS_SECONDS + 2
    os.utime(current, (nearly, nearly), follow_symlinks=False)
    async with pod.serving():  # its container was started again
        async with asyncio.timeout(20):
            while (await pod.ask("/before.js")).status != 404:
                await asyncio.sleep(0.1)
        assert (await pod.ask("/")).body == b"<h1>Shop</h1>"


async def test_the_start_command_runs_with_its_variables_and_its_status_is_the_containers(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = await make_pod(
        hosting, {"server.py": SERVER}, start="PATH=$PWD/.capsule/bin:$PATH exec python3 $PWD/server.py"
    )
    AppData(pod.folder, "shop").unmark_stale()  # as the worker does, by the container `data`
    app, scratch = pod.folder / "releases/shop/live/dep_1/app", hosting.folder.parent / "scratch"
    scratch.mkdir()
    run = (
        f"start.run(r, {{'GREETING': 'good day to you'}}, folder=folder, app=pathlib.Path({str(app)!r}),"
        f" scratch=pathlib.Path({str(scratch)!r}), mounted=folder / 'data/shop/files', port={pod.app_port})"
    )
    async with pod.container(run) as process, pod.serving() as serving:
        said = await pod.ask("/")
        assert said.body == f"https://{HOST} good day to you 127.0.0.1 1000".encode()
        assert said.headers["set-cookie"] == "a=b; Path=/"
        monkeypatch.setattr(pod_relay, "RELAY_PORT", pod.relay_port)
        state = await pod_relay.ask_relay("127.0.0.1")
        assert state.listening is not None
        assert (state.listening.port, state.listening.reached) == (pod.app_port, True)
        assert 0 <= state.idle_seconds < 10
        async with single_machine(hosting, pod):
            for path in ("/", "/trailers", "/cut"):
                await assert_same(hosting, pod, path)
        [server] = list_children(serving.pid)
        os.kill(server, signal.SIGKILL)  # Caddy, which is started again
        await pod.until(200)
        assert (await pod.ask("/crash")).status == 502
        async with asyncio.timeout(10):
            assert await process.wait() == 3
        assert process.stdout is not None
        output = await process.stdout.read()
        assert output.startswith(b"asked, with ***\n")
        said = await pod.ask("/")
        assert (said.status, said.body) == (502, b"The app does not answer at the moment.\n")
        async with pod.container(run) as process:  # as the cluster starts it again
            await pod.until(200)
            with AppData(pod.folder, "shop").stopped():
                assert (await pod.ask("/")).status != 200
            async with asyncio.timeout(10):
                assert await process.wait() == STOPPED_STATUS
        (former := hosting.folder.parent / "former").mkdir()
        stale = run.replace("folder / 'data/shop/files'", f"pathlib.Path({str(former)!r})")
        async with pod.container(stale) as process, asyncio.timeout(20):  # its volume was mounted too early
            assert await process.wait() == STOPPED_STATUS


async def test_an_app_cannot_use_up_the_memory_of_what_serves_it(hosting: Hosting) -> None:
    """Where it would be killed, the app could take the visitors' port."""
    pod = await make_pod(hosting, {"server.py": SERVER}, start="exec python3 server.py")
    async with await asyncio.start_server(say_hello, "127.0.0.1", pod.app_port), pod.serving() as serving:
        with contextlib.ExitStack() as flood:
            for _ in range(3_000):  # heads without an end
                connection = flood.enter_context(socket.socket())
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    connection.connect(("127.0.0.1", pod.port))
                await asyncio.sleep(0.001)
                with contextlib.suppress(OSError):
                    connection.send(b"GET / HTTP/1.1\r\nHost: shop\r\nX: " + b"x" * 60_000 + b"\r\n")
            await asyncio.sleep(2)
            used = sum(map(_read_memory, (serving.pid, *list_children(serving.pid))))
            assert used < 200 << 20, f"of 256 MiB, it uses {used >> 20}"
        await pod.until(200)
