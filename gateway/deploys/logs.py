"""The logs of deploys, and the times of their lines.

Redis has a log while its deploy is in progress. The storage has those of deploys that have ended, one compressed object
per deploy, in a folder per day:

    logs/<day on which the deploy was queued>/<deploy id>.gz
"""

import contextlib
import datetime
import gzip

import structlog

from gateway.deploys.records import FINAL, Deploy
from gateway.errors import StorageUnavailable
from gateway.keys import deploy_log_key
from gateway.redis.client import Store
from gateway.storage import Storage, read_object

logger = structlog.get_logger()

KEPT_DAYS = 90
MARK = "\x1f"  # between the time of a line, in ms, and its text; no line of a build contains it
LOG_BYTES = 262_144  # of one deploy
LOG_SECONDS = 2 * 86_400  # in Redis after the last line; when the deploy ends, the log moves to the storage
PACKED_BYTES = 1_048_576  # to read at most; more than the longest log


class StoredLogs:
    """The logs of deploys that have ended. Every method raises StorageUnavailable."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def write(self, deploy_id: str, day: str, text: str) -> None:
        """Stores a log, and removes the logs of days more than `KEPT_DAYS` ago."""
        await self._storage.put(_key(deploy_id, day), gzip.compress(text.encode(), mtime=0))
        await self._prune()

    async def read(self, deploy_id: str, day: str) -> str | None:
        packed = await read_object(self._storage, _key(deploy_id, day), PACKED_BYTES)
        return None if packed is None else gzip.decompress(packed).decode()

    async def _prune(self) -> None:
        today = datetime.datetime.now(datetime.UTC).date()
        for day in await self._storage.list_folders("logs/"):
            with contextlib.suppress(ValueError):
                if today - datetime.date.fromisoformat(day) > datetime.timedelta(days=KEPT_DAYS):
                    await self._storage.delete_folder(f"logs/{day}")


def _key(deploy_id: str, day: str) -> str:
    return f"logs/{day}/{deploy_id}.gz"


class DeployLogs:
    def __init__(self, store: Store, storage: Storage) -> None:
        self._store, self._stored = store, StoredLogs(storage)

    async def read(self, deploy: Deploy) -> str:
        # Redis first: the log is removed there only after it is stored.
        live = await self._store.get(deploy_log_key(deploy.account, deploy.id))
        if live is not None and deploy.state not in FINAL:  # pages that follow a deploy read it every second
            return live
        try:
            stored = await self._stored.read(deploy.id, deploy.createdAt[:10])
        except StorageUnavailable:
            return live or "… the log cannot be read at the moment: the storage does not answer\n"
        return stored if stored is not None else live or ""

    async def store(self, deploy: Deploy) -> None:
        """Moves the log of a deploy that has ended from Redis to the storage. Can be repeated.

        A log that cannot be stored stays in Redis until it expires.
        """
        key = deploy_log_key(deploy.account, deploy.id)
        text = await self._store.get(key)
        if text is None:
            return
        try:
            await self._stored.write(deploy.id, deploy.createdAt[:10], text)
        except StorageUnavailable as error:
            logger.error("deploy.log_not_stored", deploy=deploy.id, error=repr(error.__cause__))
            return
        await self._store.client.delete(key)

    async def append(self, deploy: Deploy, text: str) -> None:
        """Appends to the log. A log that is too long keeps its start, because the first error explains the others."""
        key = deploy_log_key(deploy.account, deploy.id)
        length = await self._store.client.strlen(key)
        if length >= LOG_BYTES:
            return
        if length + len(text.encode()) >= LOG_BYTES:
            room = LOG_BYTES - length
            text = text.encode()[:room].decode(errors="ignore") + "\n… the log is cut off here\n"
        await self._store.client.append(key, text)
        await self._store.client.expire(key, LOG_SECONDS)


def stamp_line(line: str, milliseconds: int) -> str:
    return f"{milliseconds}{MARK}{line}\n"


def split_times(log: str) -> tuple[str, list[int | None]]:
    """Returns the log as text, and the time of each of its lines in ms.

    A line without a time gets that of the previous line; None if no line before it has one.
    """
    lines: list[str] = []
    times: list[int | None] = []
    latest: int | None = None
    for line in log.removesuffix("\n").split("\n") if log else []:
        time, mark, text = line.rpartition(MARK)
        if mark and time.isdecimal():
            latest = int(time)
        lines.append(text)
        times.append(latest)
    ending = "\n" if log.endswith("\n") else ""
    return "\n".join(lines) + ending, times
