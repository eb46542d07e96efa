"""Serves the hosted apps: the files of a release, or the answers of its start command (`proxy.py`).

Each request reads from disk which release is current (`workers/hosting/releases.py`), so this process needs no
notification of a swap. A file that is missing in the current release is looked up in the previous one, because a page
that was loaded just before a swap still asks for its scripts. Paths without a file belong to the app's own routes and
get its index.html, unless they look like a file.
"""

from __future__ import annotations

import asyncio
import logging
import mimetypes
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpProcessingError

from workers.hosting.limits import SLOW_BYTES, SLOW_SECONDS, Busy, RequestLimits, open_files
from workers.hosting.links import open_file
from workers.hosting.proxy import Forwarder
from workers.hosting.releases import PREVIOUS_SECONDS, Site

HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
ROOM_INTERVAL = 0.25  # seconds between two checks of the number of connections
DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"  # this process's open files, as paths
BACKLOG = 4_096  # connections that wait to be accepted
KEEP_ALIVE = 75.0  # seconds; longer than nginx keeps connections, because nginx must be the one to close them
# By file extension. Python's table rather than the machine's, so that every machine and server answers the same.
TYPES = {
    **mimetypes.MimeTypes().types_map[True],
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".json": "application/json",
    ".map": "application/json",
    ".webmanifest": "application/manifest+json",
    ".wasm": "application/wasm",
    ".svg": "image/svg+xml",
    ".ico": "image/x-icon",
    ".avif": "image/avif",
    ".webp": "image/webp",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
    ".md": "text/markdown",
}
DEFAULT_TYPE = "application/octet-stream"
TEXT_TYPES = {kind for kind in TYPES.values() if kind.startswith("text/")} | {"application/json", "image/svg+xml"}

IS_PREVIEW = web.RequestKey("is_preview", bool)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AppState(msgspec.Struct, frozen=True):
    """The state of a start command. The watchdog writes it beside the link in `running`."""

    socket: str = ""  # of Unix, where the app is reached; empty while it does not run
    exits: int = 0
    last: str = ""  # how it ended last
    keeper: int = 0  # the process id of its keeper, and when that started
    began: int = 0


def state_path(folder: Path, deploy_id: str) -> Path:
    return folder / "running" / f"{deploy_id}.state"


def read_state(folder: Path, deploy_id: str) -> AppState:
    try:
        return msgspec.json.decode(state_path(folder, deploy_id).read_bytes(), type=AppState)
    except FileNotFoundError:
        return AppState()


def read_address(folder: Path) -> str:
    """The address of the server that serves the data folder, or served it last. Empty if none ever did."""
    try:
        return (folder / "web" / "address").read_text()
    except OSError:
        return ""


class AppServer:
    """Serves all apps of a data folder, while `is_current`."""

    def __init__(self, folder: Path, forwarder: Forwarder, is_current: Callable[[], bool] = lambda: True) -> None:
        self._folder, self._forwarder, self._is_current = folder, forwarder, is_current
        self._limits = RequestLimits()
        self._in_use: set[object] = set()  # connections with a request in progress

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self._in_use.add(request.protocol)
        try:
            return await self._handle(request)
        finally:
            self._in_use.discard(request.protocol)

    async def make_room(self, server: web.Server, limit: int) -> None:
        """Closes the oldest connections without a request while there are too many. Runs until it is canceled."""
        while True:
            surplus = len(server.connections) - limit
            idle = (connection for connection in server.connections if connection not in self._in_use)
            for connection in islice(idle, max(surplus, 0)):
                connection.force_close()
            await asyncio.sleep(ROOM_INTERVAL)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if not request.raw_path.startswith("/"):
            # A full URL, as sent to proxies, may name another host than the Host header.
            return web.Response(status=400, text="The request target must be a path.\n")
        if not self._is_current():
            headers = {"Retry-After": "1"}
            return web.Response(status=503, text="This host is catching up.\n", headers=headers)
        site = self._find_site(request.headers.get("Host", ""))
        if site is None or (current := site.current) is None:
            return web.Response(status=404, text="There is no app at this address.\n")
        request[IS_PREVIEW] = site.is_preview
        try:
            async with self._limits.take(site.app_id):
                return await self._answer(request, site, site.release(current))
        except Busy:
            headers = {"Retry-After": "1"}
            return web.Response(status=503, text="The app has too many requests in progress.\n", headers=headers)

    async def _answer(self, request: web.Request, site: Site, release: Path) -> web.StreamResponse:
        if (release / "app").is_dir():
            return await self._forwarder.forward(request, read_state(self._folder, release.name).socket)
        response = serve_file(request, release / "files", self._previous_files(site))
        with suppress(ConnectionError):  # the visitor has left
            await response.prepare(request)  # here, because sending belongs to the request in progress
        return response

    def _find_site(self, host: str) -> Site | None:
        name = host.partition(":")[0].lower().removesuffix(".")
        if not HOST.fullmatch(name) or ".." in name:
            return None
        try:
            target = os.readlink(self._folder / "addresses" / name)
        except OSError:
            return None
        return Site(self._folder / "addresses" / target)

    @staticmethod
    def _previous_files(site: Site) -> Path | None:
        """The files of the release that the current one replaced, for a limited time after the swap."""
        previous = site.read_link("previous")
        with suppress(OSError):
            if previous is not None and site.seconds_since_swap < PREVIOUS_SECONDS:
                return site.release(previous) / "files"
        return None


# -- files ---------------------------------------------------------------------------------------------------


def serve_file(request: web.Request, folder: Path, previous: Path | None = None) -> web.StreamResponse:
    if request.method not in ("GET", "HEAD"):
        return web.Response(status=405, headers={"Allow": "GET, HEAD"})
    raw, _, query = request.raw_path.partition("?")
    try:
        path = unquote(raw, errors="strict")
    except UnicodeDecodeError:
        return _not_found()
    parts = [part for part in path.split("/") if part]
    # Names that start with a dot are private, except the standard folder .well-known.
    if any(part.startswith(".") and part != ".well-known" for part in parts) or any(c in path for c in "\\\0"):
        return _not_found()
    with suppress(OSError):  # such as too long a name
        if (response := _find_file(folder, parts, path, query)) is not None:
            return response
        if previous is not None and parts and Path(parts[-1]).suffix not in ("", ".html"):
            old = previous.joinpath(*parts)
            if (file := open_file(old, previous)) is not None:
                return _File(file, old)
        looks_like_file = parts and "." in parts[-1] and "text/html" not in request.headers.get("Accept", "")
        if not looks_like_file and (file := open_file(page := folder / "index.html", folder)) is not None:
            return _File(file, page)
    return _not_found()


def _find_file(folder: Path, parts: list[str], path: str, query: str) -> web.StreamResponse | None:
    requested = folder.joinpath(*parts)
    if not path.endswith("/") and (file := open_file(requested, folder)) is not None:
        return _File(file, requested)
    if (file := open_file(page := requested / "index.html", folder)) is not None:
        if path.endswith("/"):
            return _File(file, page)
        file.close()
        location = f"/{quote('/'.join(parts))}/{'?' if query else ''}{query}"
        return web.Response(status=308, headers={"Location": location})
    if parts:
        page = requested.with_name(f"{requested.name}.html")
        if (file := open_file(page, folder)) is not None:
            return _File(file, page)
    return None


class _File(web.FileResponse):
    """A file that is sent once, and only as long as the visitor reads it fast enough."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        kind = TYPES.get(path.suffix.lower(), DEFAULT_TYPE)
        charset = "; charset=utf-8" if kind in TEXT_TYPES else ""
        # Browsers may store files, but revalidate them on each use, because the next deploy may change them.
        headers = {"Content-Type": kind + charset, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        super().__init__(f"{DESCRIPTORS}/{file.fileno()}", headers=headers)
        self._file = file
        self._seconds = SLOW_SECONDS + os.fstat(file.fileno()).st_size / SLOW_BYTES

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if self.prepared:
            return None
        try:
            async with asyncio.timeout(self._seconds):
                return await super().prepare(request)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return None
        finally:
            self._file.close()


def _not_found() -> web.Response:
    return web.Response(status=404, text="Not Found\n")


# -- servers -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serve(
    folder: Path,
    *,
    apps_domain: str = "",
    host: str = "",
    port: int = 0,
    socket: Path | None = None,
    is_current: Callable[[], bool] = lambda: True,
) -> AsyncIterator[None]:
    """Serves the apps on a port, or on a Unix socket."""
    if socket is not None:
        _remove_stale(socket)
    apps = AppServer(folder, Forwarder(apps_domain), is_current)
    async with _runner(apps.handle) as runner, _making_room(apps, runner):
        if socket is not None:
            await web.UnixSite(runner, socket, backlog=BACKLOG).start()
            os.chmod(socket, 0o666)  # noqa: S103 - nginx runs as another user
        else:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        yield


@asynccontextmanager
async def _making_room(apps: AppServer, runner: web.AppRunner) -> AsyncIterator[None]:
    """Leaves half of the descriptors to what requests open."""
    assert runner.server is not None
    task = asyncio.create_task(apps.make_room(runner.server, open_files() // 2))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _remove_stale(socket: Path) -> None:
    """A server that was killed leaves its socket behind."""
    socket.unlink(missing_ok=True)


@asynccontextmanager
async def serve_release(release: Path) -> AsyncIterator[int]:
    """Serves one release's files on a port of their own; yields the port."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return serve_file(request, release / "files")

    async with _runner(handle) as runner:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield int(runner.addresses[0][1])


@asynccontextmanager
async def _runner(handle: Handler) -> AsyncIterator[web.AppRunner]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    app.on_response_prepare.append(_set_headers)
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,  # or an app would keep streaming after its visitor has left
        logger=_logger,
        auto_decompress=False,  # forward bodies unchanged
        keepalive_timeout=KEEP_ALIVE,
        shutdown_timeout=5.0,
    )
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


class _DropMalformedRequests(logging.Filter):
    """aiohttp would log malformed request heads, which are the client's mistake and may contain secrets."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_logger = logging.getLogger(__name__)
_logger.addFilter(_DropMalformedRequests())


async def _set_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop("Server", None)
    if request.get(IS_PREVIEW):
        response.headers["X-Robots-Tag"] = "noindex"
