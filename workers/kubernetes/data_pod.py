"""Keeps the data of an app, in the container `data`: of the app's pod, or of a pod of its own beside them (`pod.py`).

It measures the files, packs and replaces them when the worker `sites` asks (`data_agent.py`), and stops the start
command meanwhile. It is the same user as the start command, which sees only `files` (`workers/hosting/data.py`).

Every request has the token of the data. An answer is 204 without a body, or 200 with an archive or a report, or 409
with a reason for account holders. All requests can be repeated.

    POST /report?limit=BYTES            reports how large the files are; sets the limit if there is one
    POST /begin                         lets the app start on a new volume, which may have got a snapshot
    POST /snapshot                      packs the files. 204: there are none
    POST /daily                         packs them if that is due, and something has changed
    POST /daily/done                    notes that this snapshot is stored
    PUT  /restore?deploy=ID&limit=BYTES replaces the files by the archive in the body, and packs those from before
    POST /clear?deploy=ID               removes the files, and packs them
    POST /undo?deploy=ID                brings back the files from before the restore
    POST /confirm?deploy=ID             removes the files from before a restore or a clear
"""

import asyncio
import contextlib
import hmac
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ParamSpec

import msgspec
from aiohttp import web

from gateway.cancellation import run_in_background, run_in_thread
from workers.hosting.data import AppData, is_empty
from workers.hosting.packing import NOT_STOPPED, DataError, SandboxPacker
from workers.kubernetes.pod import DATA_PORT
from workers.kubernetes.volume import begin, is_new, prepare_volume
from workers.sandbox.keeper import DataFolder
from workers.sandbox.sandbox import APP_USERS, TMP, Sandbox

P = ParamSpec("P")

CHUNK_BYTES = 1 << 18  # per read of an archive
MEASURE_SECONDS = 1.0  # between looks whether the files must be measured
NOTES, NOTES_BYTES = "Capsule-Notes", 4_000  # the header with what an archive lacks, as JSON


class DataReport(msgspec.Struct, frozen=True):
    used: int  # bytes
    full: bool
    held: bool  # nothing of the app runs
    new: bool  # nothing has run on this volume; nothing does until `/begin`


async def keep_data(
    data: AppData, token: Path, *, scratch: Path = Path(TMP), port: int = DATA_PORT, host: str | None = None
) -> None:
    """Answers the worker until SIGTERM. Without a host, listens everywhere.

    `token` is a file, which changes with the service's encryption key. `scratch`: where archives are made.
    """
    await run_in_thread(prepare_volume, data)
    sandbox = Sandbox(development=True, users=APP_USERS, trusted=True)  # the container is the sandbox
    await run_in_thread(sandbox.check, scratch)
    requests = _Requests(data, SandboxPacker(sandbox, scratch), scratch)
    application = web.Application(client_max_size=0, middlewares=[_authorize(token)])
    for path in ("report", "begin", "snapshot", "daily", "daily/done", "clear", "undo", "confirm"):
        application.router.add_post(f"/{path}", getattr(requests, path.replace("/", "_")))
    application.router.add_put("/restore", requests.restore)
    folder = DataFolder(str(data.folder))

    async def keep_measuring() -> None:
        while True:
            with contextlib.suppress(OSError):  # a file has just gone
                await run_in_thread(folder.is_full)
            await asyncio.sleep(MEASURE_SECONDS)

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=5)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        async with run_in_background(keep_measuring()):
            await stopped.wait()
    finally:
        await runner.cleanup()


def _authorize(token: Path) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def authorize(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        check_token(request, await run_in_thread(token.read_text))
        try:
            return await handler(request)
        except DataError as error:
            raise web.HTTPConflict(text=str(error)) from None

    return authorize


def check_token(request: web.Request, token: str) -> None:
    """Raises HTTPUnauthorized for another token, and for an empty one."""
    given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
    if not token or not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise web.HTTPUnauthorized


class _Requests:
    """What each path does."""

    def __init__(self, data: AppData, packer: SandboxPacker, scratch: Path) -> None:
        self._data, self._packer, self._scratch = data, packer, scratch

    async def report(self, request: web.Request) -> web.StreamResponse:
        if limit := request.query.get("limit"):
            self._data.limit = int(limit)
        report = DataReport(self._data.used, self._data.is_full, self._data.is_held, is_new(self._data))
        return web.Response(body=msgspec.json.encode(report))

    async def begin(self, _: web.Request) -> web.StreamResponse:
        begin(self._data)
        return web.Response(status=204)

    async def snapshot(self, request: web.Request) -> web.StreamResponse:
        return await self._send(request, self._data.files)

    async def daily(self, request: web.Request) -> web.StreamResponse:
        await run_in_thread(self._data.remove_leftovers)
        due = await run_in_thread(self._data.needs_daily, time.time())
        return await self._send(request, self._data.files) if due else web.Response(status=204)

    async def daily_done(self, _: web.Request) -> web.StreamResponse:
        await run_in_thread(self._data.note_daily, time.time())
        return web.Response(status=204)

    async def restore(self, request: web.Request) -> web.StreamResponse:
        deploy, limit = request.query["deploy"], int(request.query["limit"])
        if not self._data.was_replaced(deploy):
            archive = self._scratch / "incoming.tar.gz"
            try:
                with archive.open("wb") as file:
                    async for chunk in request.content.iter_any():
                        await run_in_thread(file.write, chunk)
                async with self._packer.unpacked(self._data, archive, limit) as incoming:
                    await self._stop_and(self._data.replace, incoming, deploy)
            finally:
                archive.unlink(missing_ok=True)
        return await self._send(request, self._data.replaced(deploy))

    async def clear(self, request: web.Request) -> web.StreamResponse:
        deploy = request.query["deploy"]
        if not self._data.was_replaced(deploy) and not await run_in_thread(is_empty, self._data.files):
            empty = self._data.folder / "empty"
            empty.mkdir(mode=0o700, exist_ok=True)
            await self._stop_and(self._data.replace, empty, deploy)
        return await self._send(request, self._data.replaced(deploy))

    async def undo(self, request: web.Request) -> web.StreamResponse:
        if self._data.was_replaced(request.query["deploy"]):
            await self._stop_and(self._data.undo, request.query["deploy"])
        return web.Response(status=204)

    async def confirm(self, request: web.Request) -> web.StreamResponse:
        await run_in_thread(self._data.confirm, request.query["deploy"])
        return web.Response(status=204)

    async def _stop_and(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        def stop_and_work() -> None:
            with self._data.stopped():
                work(*args, **kwargs)

        try:
            await run_in_thread(stop_and_work)
        except TimeoutError:
            raise DataError(NOT_STOPPED) from None

    async def _send(self, request: web.Request, files: Path) -> web.StreamResponse:
        """Answers with the files in an archive."""
        if await run_in_thread(is_empty, files):
            return web.Response(status=204)
        async with self._packer.packed(self._data, files) as (packed, notes):
            while len(header := msgspec.json.encode(notes).decode().encode("ascii", "backslashreplace")) > NOTES_BYTES:
                notes.pop()
            size = (await run_in_thread(packed.stat)).st_size
            answer = web.StreamResponse(headers={NOTES: header.decode(), "Content-Length": str(size)})
            await answer.prepare(request)
            with packed.open("rb") as file:
                while chunk := await run_in_thread(file.read, CHUNK_BYTES):
                    await answer.write(chunk)
        return answer
