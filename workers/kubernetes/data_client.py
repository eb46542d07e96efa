"""The client of a pod that keeps the data of an app (`data_pod.py`), for the worker `sites`.

The pod is not trusted: the app in it may answer in place of its container `data`. So an answer counts only with its
proof, follows nobody elsewhere, and has a limit of size and time. Whatever is wrong with it is a DataError, except for
a full disk.
"""

import hmac
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import msgspec
import structlog
from yarl import URL

from gateway.errors import StorageFull
from workers.engine.data import ARCHIVE_BYTES
from workers.engine.data_keeper import DataReport, Handover, Packed
from workers.engine.packing import DataError
from workers.kubernetes.data_pod import NONCE, PROOF, STORED, WORK_SECONDS, Reply, receive_file, send_file, sign
from workers.kubernetes.pod import DATA_PORT

logger = structlog.get_logger()

REPORT_SECONDS = 5.0  # in which a pod must accept a connection, and report
REPLY_BYTES = 65_536  # of an answer or a message, except for those with a part of an archive
REASON_LENGTH = 500
NO_ANSWER = "The app's pod did not answer; try again shortly."


class DataClient:
    """Implements `Keeper`."""

    def __init__(self, address: str, token: str, archive: Path) -> None:
        """`archive` is the file in which archives are received."""
        host = f"[{address}]" if ":" in address else address
        self._url, self._token, self._archive = URL(f"http://{host}:{DATA_PORT}"), token, archive

    async def report(self, limit: int | None = None) -> DataReport:
        answer = await self._call("report", limit, seconds=REPORT_SECONDS)
        with _explain_failures("report"):
            return msgspec.json.decode(answer, type=DataReport)

    def snapshot(self) -> Handover:
        return self._take("snapshot")

    def daily(self) -> Handover:
        return self._take("daily")

    def restore(self, archive: Path, change: str, limit: int) -> Handover:
        return self._take("restore", change, limit, archive=archive)

    def clear(self, change: str) -> Handover:
        return self._take("clear", change)

    async def undo(self, change: str) -> None:
        await self._call("undo", change)

    async def confirm(self, change: str) -> None:
        await self._call("confirm", change)

    async def begin(self, snapshot_id: str) -> None:
        await self._call("begin", snapshot_id)

    @asynccontextmanager
    async def _take(
        self, method: str, *arguments: str | int, archive: Path | None = None
    ) -> AsyncIterator[Packed | None]:
        """Sends the archive, if there is one. Yields the packed files, and lets the pod go on afterwards."""
        async with AsyncExitStack() as stack:
            stack.callback(self._archive.unlink, missing_ok=True)
            with _explain_failures(method):
                url, headers, proof = self._sign(method, arguments)
                client = await stack.enter_async_context(self._open(WORK_SECONDS))
                socket = await stack.enter_async_context(client.ws_connect(url, headers=headers))
                if not hmac.compare_digest((await socket.receive_str(timeout=REPORT_SECONDS)).encode(), proof):
                    raise aiohttp.ClientError("it is not the keeper of the data")
                if archive is None:
                    await socket.send_bytes(b"")
                else:
                    await send_file(socket, archive)
                reply = await _receive_reply(socket)
                if reply.notes is not None:
                    await receive_file(socket, self._archive, most=ARCHIVE_BYTES)
            yield None if reply.notes is None else Packed(self._archive, reply.notes)
            with _explain_failures(method):
                await socket.send_str(STORED)
                await _receive_reply(socket)

    async def _call(self, method: str, *arguments: str | int | None, seconds: float = WORK_SECONDS) -> bytes:
        with _explain_failures(method):
            url, headers, proof = self._sign(method, arguments)
            async with self._open(seconds) as client, client.post(url, headers=headers) as answer:
                if not hmac.compare_digest(answer.headers.get(PROOF, "").encode(errors="surrogateescape"), proof):
                    raise aiohttp.ClientError("it is not the keeper of the data")
                body = await answer.content.read(REPLY_BYTES)
                if answer.status == 409:
                    raise DataError(body.decode(errors="replace")[:REASON_LENGTH])
                answer.raise_for_status()
                return body

    def _sign(self, method: str, arguments: Sequence[str | int | None]) -> tuple[URL, dict[str, str], bytes]:
        """Returns the address of a request, its headers, and the proof that its answer must have."""
        url, nonce = self._url / method % {"arguments": msgspec.json.encode(arguments).decode()}, secrets.token_hex(16)
        headers = {NONCE: nonce, "Authorization": sign(self._token, nonce, url.raw_path_qs)}
        return url, headers, sign(self._token, nonce, PROOF).encode()

    def _open(self, seconds: float) -> aiohttp.ClientSession:
        async def stay(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
            if request.url.origin() != self._url:
                raise aiohttp.ClientError("it leads elsewhere")
            return await send(request)

        timeout = aiohttp.ClientTimeout(total=seconds, connect=REPORT_SECONDS)
        return aiohttp.ClientSession(timeout=timeout, middlewares=[stay])


async def _receive_reply(socket: aiohttp.ClientWebSocketResponse) -> Reply:
    text = await socket.receive_str(timeout=WORK_SECONDS)
    reply = msgspec.json.decode(text[:REPLY_BYTES], type=Reply)
    if reply.is_full:
        raise StorageFull
    if reply.error:
        raise DataError(reply.error[:REASON_LENGTH], service_fault=reply.service_fault)
    return reply


@contextmanager
def _explain_failures(method: str) -> Iterator[None]:
    """Raises DataError if the pod does not answer, or ends the connection."""
    try:
        yield
    except (aiohttp.ClientError, aiohttp.WSMessageTypeError, msgspec.MsgspecError, OSError) as error:
        logger.warning("data.pod_failed", method=method, reason=str(error) or type(error).__name__)
        raise DataError(NO_ANSWER, service_fault=True) from None
