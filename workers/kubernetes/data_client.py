"""The client of a pod that keeps the data of an app (`data_pod.py`), for the worker `sites`."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import msgspec
import structlog
from yarl import URL

from workers.engine.data import ARCHIVE_BYTES
from workers.engine.data_keeper import DataReport, Handover, Packed
from workers.engine.packing import DataError
from workers.kubernetes.data_pod import STORED, WORK_SECONDS, Reply, receive_file, send_file
from workers.kubernetes.pod import DATA_PORT

logger = structlog.get_logger()

REPORT_SECONDS = 5.0  # in which a pod must accept a connection, and report


class DataClient:
    """Implements `Keeper`."""

    def __init__(self, address: str, token: str, archive: Path) -> None:
        """`archive` is the file in which archives are received."""
        host = f"[{address}]" if ":" in address else address
        self._url, self._headers = f"http://{host}:{DATA_PORT}", {"Authorization": f"Bearer {token}"}
        self._archive = archive

    async def report(self, limit: int | None = None) -> DataReport:
        return msgspec.json.decode(await self._call("report", limit, seconds=REPORT_SECONDS), type=DataReport)

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
                client = await stack.enter_async_context(self._open(WORK_SECONDS))
                socket = await stack.enter_async_context(client.ws_connect(self._locate(method, arguments)))
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
            async with self._open(seconds) as client, client.post(self._locate(method, arguments)) as answer:
                if answer.status == 409:
                    raise DataError(await answer.text())
                answer.raise_for_status()
                return await answer.read()

    def _locate(self, method: str, arguments: Sequence[str | int | None]) -> URL:
        return URL(self._url) / method % {"arguments": msgspec.json.encode(arguments).decode()}

    def _open(self, seconds: float) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=seconds, connect=REPORT_SECONDS)
        return aiohttp.ClientSession(timeout=timeout, headers=self._headers)


async def _receive_reply(socket: aiohttp.ClientWebSocketResponse) -> Reply:
    reply = msgspec.json.decode(await socket.receive_str(timeout=WORK_SECONDS), type=Reply)
    if reply.error:
        raise DataError(reply.error)
    return reply


@contextmanager
def _explain_failures(method: str) -> Iterator[None]:
    """Raises DataError if the pod does not answer, or ends the connection."""
    try:
        yield
    except (aiohttp.ClientError, aiohttp.WSMessageTypeError, TimeoutError) as error:
        logger.warning("data.pod_failed", method=method, reason=str(error) or type(error).__name__)
        raise DataError("The app's pod did not answer; try again shortly.") from None
