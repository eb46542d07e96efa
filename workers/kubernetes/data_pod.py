"""Keeps the data of an app, in the container `data`: of the app's pod, or of a pod of its own beside them (`pod.py`).

A `DataKeeper` measures, packs and replaces the files when the worker `sites` asks (`data_client.py`), and stops the
start command meanwhile. It is the same user as the start command, which sees only `files`.

The path of a request is a method of the keeper, and `arguments` are the method's as JSON. Worker and pod share a token,
which neither sends: the app in the pod may have taken the port. A request is signed with it, and what answers proves
that it has it.

`POST /report`, `/undo`, `/confirm` and `/begin` are answered with what the method returns, or with 409 and a reason for
account holders. `/snapshot`, `/daily`, `/restore` and `/clear` are WebSockets, because they hand files over before they
take effect. If the connection ends, they take none:

    pod      its proof
    worker   the archive for a restore; for the others, an empty one
    pod      a `Reply` with the notes of the packed files, and their archive; without notes, there are no files
    worker   `STORED`
    pod      an empty `Reply`, when the files are replaced

A `Reply` with an error ends this. An archive is sent in binary messages, of which the last one is empty.

One thing is done at a time. A new WebSocket ends the one before, whose worker has been replaced.
"""

import asyncio
import contextlib
import hmac
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from gateway.cancellation import run_in_background, run_in_thread
from gateway.storage import is_full
from workers.engine.app_data import AppData
from workers.engine.data_keeper import DataKeeper
from workers.engine.packing import DataError, SandboxPacker
from workers.kubernetes.pod import DATA_PORT
from workers.kubernetes.volume import prepare_volume
from workers.sandbox.keeper import DataFolder, limit_files
from workers.sandbox.sandbox import APP_USERS, TMP, Sandbox

CHUNK_BYTES = 1 << 18  # per message of an archive
MEASURE_SECONDS = 1.0  # between looks whether the files must be measured
WORK_SECONDS = 1_800.0  # in which the other side must go on
STORED = "stored"
FILES = 128  # and connections, that may be open; what is read of each at once takes 256 KB
HEAD_FIELDS, FIELD_BYTES = 16, 1_024  # of a request
NONCE, PROOF = "Capsule-Nonce", "Capsule-Proof"  # headers


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    error: str = ""
    is_full: bool = False  # the error is that of a full disk; workers of an earlier version only know `error`
    service_fault: bool = False  # as of a DataError
    notes: list[str] | None = None  # what the archive lacks that follows; None: none follows


def run(data: AppData, token: Path, *, scratch: Path = Path(TMP), host: str | None = None) -> None:
    """Keeps the data until SIGTERM. The app can connect here, and cannot use up the memory of this process."""
    limit_files(FILES)
    asyncio.run(keep_data(data, token, scratch=scratch, host=host))


async def keep_data(data: AppData, token: Path, *, scratch: Path = Path(TMP), host: str | None = None) -> None:
    """Answers the worker until SIGTERM. Without a host, listens everywhere.

    `token` is a file, which changes with the service's encryption key. `scratch`: where archives are made.
    """
    await run_in_thread(prepare_volume, data)
    sandbox = Sandbox(development=True, users=APP_USERS, trusted=True)  # the container is the sandbox
    await run_in_thread(sandbox.check, scratch)
    requests = _Requests(DataKeeper(data, SandboxPacker(sandbox, scratch)), scratch)
    application = web.Application(client_max_size=0, middlewares=[_authorize(token)])
    application.router.add_post("/{method:report|undo|confirm|begin}", requests.call)
    application.router.add_get("/{method:snapshot|daily|restore|clear}", requests.hand_over)
    folder = DataFolder(str(data.folder))

    async def keep_measuring() -> None:
        while True:
            with contextlib.suppress(OSError):  # a file has just gone
                await run_in_thread(folder.is_full)
            await asyncio.sleep(MEASURE_SECONDS)

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    limits = {"max_headers": HEAD_FIELDS, "max_field_size": FIELD_BYTES}
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=5, **limits)  # type: ignore[arg-type]
    await runner.setup()
    try:
        await web.TCPSite(runner, host, DATA_PORT).start()
        async with run_in_background(keep_measuring()):
            await stopped.wait()
    finally:
        await runner.cleanup()


def _authorize(token: Path) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def authorize(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        secret, nonce = await run_in_thread(token.read_text), request.headers.get(NONCE, "")
        wanted, given = sign(secret, nonce, request.path_qs), request.headers.get("Authorization", "")
        if not secret or not hmac.compare_digest(given.encode(errors="surrogateescape"), wanted.encode()):
            raise web.HTTPUnauthorized
        request[PROOF] = sign(secret, nonce, PROOF)
        try:
            answer = await handler(request)
        except DataError as error:
            answer = web.Response(status=409, text=str(error))
        if not answer.prepared:
            answer.headers[PROOF] = request[PROOF]
        return answer

    return authorize


def sign(token: str, nonce: str, text: str) -> str:
    """Returns what only those can make who have the token: of a request, or of what answers it."""
    return hmac.digest(token.encode(), f"{nonce} {text}".encode(errors="surrogateescape"), "sha256").hex()


class _Requests:
    def __init__(self, keeper: DataKeeper, scratch: Path) -> None:
        self._keeper, self._scratch = keeper, scratch
        self._current: asyncio.Task[object] | None = None  # of the last WebSocket

    async def call(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=msgspec.json.encode(await self._call(request)))

    def _call(self, request: web.Request, *archive: Path) -> Any:
        """Calls the method. An archive, if there is one, is its first argument."""
        arguments = msgspec.json.decode(request.query["arguments"])
        return getattr(self._keeper, request.match_info["method"])(*archive, *arguments)

    async def hand_over(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str(request[PROOF])
        async with self._taking_over():
            archive = self._scratch / "incoming.tar.gz"
            try:
                await receive_file(socket, archive, most=None)
                given = [archive] if request.match_info["method"] == "restore" else []
                async with self._call(request, *given) as packed:
                    await _reply(socket, Reply(notes=None if packed is None else packed.notes))
                    if packed is not None:
                        await send_file(socket, packed.archive)
                    if await socket.receive_str(timeout=WORK_SECONDS) != STORED:
                        raise ConnectionError
                await _reply(socket, Reply())
            except DataError as error:
                await _reply(socket, Reply(error=str(error), service_fault=error.service_fault))
            except (aiohttp.WSMessageTypeError, ConnectionError, TimeoutError):
                pass  # the worker has gone, and nothing has happened
            except OSError as error:
                if not is_full(error):
                    raise
                await _reply(socket, Reply(error="The disk is full.", is_full=True))
            finally:
                archive.unlink(missing_ok=True)
        await socket.close()
        return socket

    @asynccontextmanager
    async def _taking_over(self) -> AsyncIterator[None]:
        """Ends what the WebSocket before is doing."""
        former, self._current = self._current, asyncio.current_task()
        if former is not None:
            former.cancel()
            await asyncio.wait([former])
        try:
            yield
        finally:
            if self._current is asyncio.current_task():
                self._current = None


async def _reply(socket: web.WebSocketResponse, reply: Reply) -> None:
    await socket.send_str(msgspec.json.encode(reply).decode())


Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def send_file(socket: Socket, path: Path) -> None:
    with path.open("rb") as file:
        while chunk := await run_in_thread(file.read, CHUNK_BYTES):
            await socket.send_bytes(chunk)
    await socket.send_bytes(b"")


async def receive_file(socket: Socket, path: Path, *, most: int | None) -> None:
    """Raises DataError for more bytes."""
    size = 0
    with path.open("wb") as file:
        while chunk := await socket.receive_bytes(timeout=WORK_SECONDS):
            size += len(chunk)
            if most is not None and size > most:
                raise DataError("The snapshot would be too large.")
            await run_in_thread(file.write, chunk)
