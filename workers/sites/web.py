"""Serves the hosted apps: a host's files, or what its start command answers (`forward.py`).

Which release is served is read from disk at each request (`releases.py`), so that a swap needs no word to this
process. A file that the current release has no more is looked for in the one before: a page that was loaded just
before a swap still asks for its scripts. Addresses without a file are the app's own routes and get its index.html,
unless they look like a file.
"""

from __future__ import annotations

import logging
import mimetypes
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from workers.deploys.releases import Site
from workers.sites.forward import Forward

HOST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
OLD_SECONDS = 600.0  # after a swap
WAITING = 4_096  # connections that were not taken yet
KEEP_ALIVE = 75.0  # seconds; longer than nginx, which must be the one to end a connection
# By ending. Python's own table, not the machine's: each machine and each server shall say the same.
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
OTHER_TYPE = "application/octet-stream"
TEXTS = {kind for kind in TYPES.values() if kind.startswith("text/")} | {"application/json", "image/svg+xml"}

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Running(msgspec.Struct, frozen=True):
    """What the watchdog writes down of a start command, beside its link in `running`."""

    port: int = 0  # 0: it does not run just now
    exits: int = 0
    last: str = ""  # how it ended the last time


def running_path(folder: Path, deploy_id: str) -> Path:
    return folder / "running" / f"{deploy_id}.state"


def running(folder: Path, deploy_id: str) -> Running:
    try:
        return msgspec.json.decode(running_path(folder, deploy_id).read_bytes(), type=Running)
    except FileNotFoundError:
        return Running()


class Web:
    """`folder`: the data folder."""

    def __init__(self, folder: Path, forward: Forward) -> None:
        self._folder, self._forward = folder, forward

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not request.raw_path.startswith("/"):
            # The form that is for proxies can name another host than the header does.
            return web.Response(status=400, text="Ask for a path.\n")
        site = self._site(request.headers.get("Host", ""))
        if site is None or (current := site.current) is None:
            return web.Response(status=404, text="There is no app at this address.\n")
        release = site.release(current)
        if (release / "app").is_dir():
            return await self._forward.answer(request, running(self._folder, current).port)
        return files(request, release / "files", self._before(site))

    def _site(self, host: str) -> Site | None:
        name = host.partition(":")[0].lower().removesuffix(".")
        if not HOST.fullmatch(name) or ".." in name:
            return None
        try:
            target = os.readlink(self._folder / "addresses" / name)
        except OSError:
            return None
        return Site(self._folder / "addresses" / target)

    @staticmethod
    def _before(site: Site) -> Path | None:
        """What the current release replaced, for a while: then a file that was taken away is gone."""
        previous = site.linked("previous")
        with suppress(OSError):
            if previous is not None and time.time() - (site.folder / "current").lstat().st_mtime < OLD_SECONDS:
                return site.release(previous) / "files"
        return None


# -- files ---------------------------------------------------------------------------------------------------


def files(request: web.Request, folder: Path, before: Path | None = None) -> web.StreamResponse:
    if request.method not in ("GET", "HEAD"):
        return web.Response(status=405, headers={"Allow": "GET, HEAD"})
    raw, _, query = request.raw_path.partition("?")
    try:
        path = unquote(raw, errors="strict")
    except UnicodeDecodeError:
        return _not_found()
    parts = [part for part in path.split("/") if part]
    # A name with a dot in front is nobody's to read, whatever it is; but for the web's own folder.
    if any(part.startswith(".") and part != ".well-known" for part in parts) or any(c in path for c in "\\\0"):
        return _not_found()
    with suppress(OSError):  # such as a name that is too long
        if (found := _found(folder, parts, path, query)) is not None:
            return found
        if before is not None and parts and Path(parts[-1]).suffix not in ("", ".html"):
            old = before.joinpath(*parts)
            if old.is_file():
                return _file(old)
        a_file = parts and "." in parts[-1] and "text/html" not in request.headers.get("Accept", "")
        if not a_file and (folder / "index.html").is_file():
            return _file(folder / "index.html")
    return _not_found()


def _found(folder: Path, parts: list[str], path: str, query: str) -> web.StreamResponse | None:
    asked = folder.joinpath(*parts)
    if not path.endswith("/") and asked.is_file():
        return _file(asked)
    if (asked / "index.html").is_file():
        if path.endswith("/"):
            return _file(asked / "index.html")
        location = f"/{quote('/'.join(parts))}/{'?' if query else ''}{query}"
        return web.Response(status=308, headers={"Location": location})
    if parts and (page := asked.with_name(f"{asked.name}.html")).is_file():
        return _file(page)
    return None


def _not_found() -> web.Response:
    return web.Response(status=404, text="Not Found\n")


def _file(path: Path) -> web.FileResponse:
    kind = TYPES.get(path.suffix.lower(), OTHER_TYPE)
    charset = "; charset=utf-8" if kind in TEXTS else ""
    # Kept, but asked about at each use: a name's content changes with the next deploy.
    headers = {"Content-Type": kind + charset, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(path, headers=headers)


# -- servers -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(folder: Path, *, host: str = "", port: int = 0, socket: Path | None = None) -> AsyncIterator[None]:
    """On a port, or on a socket in the file system."""
    if socket is not None:
        _forget(socket)
    forward = Forward()
    try:
        async with _runner(Web(folder, forward).answer) as runner:
            if socket is not None:
                await web.UnixSite(runner, socket, backlog=WAITING).start()
                os.chmod(socket, 0o666)  # noqa: S103 - the web server in front has a user of its own
            else:
                await web.TCPSite(runner, host, port, backlog=WAITING).start()
            yield
    finally:
        await forward.close()


def _forget(socket: Path) -> None:
    """Of a server that was killed."""
    socket.unlink(missing_ok=True)


@asynccontextmanager
async def aside(release: Path) -> AsyncIterator[int]:
    """One release's files at a port of their own, which nobody else knows."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return files(request, release / "files")

    async with _runner(answer) as runner:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield int(runner.addresses[0][1])


@asynccontextmanager
async def _runner(answer: Answer) -> AsyncIterator[web.AppRunner]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    app.on_response_prepare.append(_nameless)
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,  # else an app streams on to a browser that has left
        logger=_log,
        auto_decompress=False,  # a body is passed on as it came
        keepalive_timeout=KEEP_ALIVE,
        shutdown_timeout=5.0,
    )
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


class _OursAlone(logging.Filter):
    """A head that makes no sense is its sender's affair, and may hold a secret, which aiohttp would log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_log = logging.getLogger(__name__)
_log.addFilter(_OursAlone())


async def _nameless(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.pop("Server", None)
