"""The logs of deploys: their lines, with times, and what is kept of long ones.

Redis has a log while its deploy is in progress. The storage has those of deploys that have ended, one compressed object
per deploy, in a folder per day:

    logs/<day on which the deploy was queued>/<deploy id>.gz

A log that is too long keeps its first part, which says how the deploy began, and its last part, which says why it
failed. A line between them has the number of the missing lines. Lines are counted from the beginning of the deploy, the
missing ones too, so a reader who names the number of lines that it has gets each later line once.
"""

import contextlib
import datetime
import gzip
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import structlog

from gateway.deploys.line_times import split_stamp
from gateway.deploys.records import FINAL, Deploy
from gateway.errors import StorageUnavailable
from gateway.keys import deploy_log_key
from gateway.redis.client import Store
from gateway.storage import Storage, read_object

logger = structlog.get_logger()

KEPT_DAYS = 90
GAP = "\x1e"  # begins the line with the number of missing lines; no line of a build contains it
GAP_LINE = re.compile(rb"^\x1e(\d+)\n", re.MULTILINE)
FIRST_BYTES, LAST_BYTES = 65_536, 196_608  # of a log that are kept
SPARE_BYTES = 65_536  # that a log in Redis may be longer, so that it is shortened rarely
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
            return shorten(live)
        try:
            stored = await self._stored.read(deploy.id, deploy.createdAt[:10])
        except StorageUnavailable:
            return live or "… the log cannot be read at the moment: the storage does not answer\n"
        return shorten(stored if stored is not None else live or "")

    async def store(self, deploy: Deploy) -> None:
        """Moves the log of a deploy that has ended from Redis to the storage. Can be repeated.

        A log that cannot be stored stays in Redis until it expires.
        """
        key = deploy_log_key(deploy.account, deploy.id)
        text = await self._store.get(key)
        if text is None:
            return
        try:
            await self._stored.write(deploy.id, deploy.createdAt[:10], shorten(text))
        except StorageUnavailable as error:
            logger.error("deploy.log_not_stored", deploy=deploy.id, error=repr(error.__cause__))
            return
        await self._store.client.delete(key)

    async def append(self, deploy: Deploy, text: str) -> None:
        """Appends whole lines to the log, and shortens a log that becomes too long. A log has one writer."""
        key = deploy_log_key(deploy.account, deploy.id)
        length = await self._store.client.append(key, shorten(text))
        if length > FIRST_BYTES + LAST_BYTES + SPARE_BYTES:
            await self._store.client.set(key, shorten(await self._store.get(key) or ""))
        await self._store.client.expire(key, LOG_SECONDS)


def shorten(log: str) -> str:
    """Returns the first and the last part of a log that is too long, and between them the number of missing lines.

    Parts may be missing already. What is between two of them is left out too, so one line says how much is missing.
    """
    data = log.encode()
    gaps = [*GAP_LINE.finditer(data)]
    if not gaps and len(data) <= FIRST_BYTES + LAST_BYTES:
        return log
    first = data[: gaps[0].start()] if gaps else data
    if len(first) > FIRST_BYTES:
        first = first[: first.rfind(b"\n", 0, FIRST_BYTES) + 1]
    last = data[gaps[-1].end() if gaps else len(first) :]
    if len(last) > LAST_BYTES:
        last = last[last.find(b"\n", len(last) - LAST_BYTES - 1) + 1 :]
    left_out = data[len(first) : len(data) - len(last)]
    missing = left_out.count(b"\n") - len(gaps) + sum(int(gap[1]) for gap in gaps)
    return f"{first.decode()}{GAP}{missing}\n{last.decode()}"


class Line(NamedTuple):
    text: str
    time: int | None = None  # ms; None if no line before it has one
    stands_for: int = 1  # lines of the deploy; only the line that says how many are missing stands for others


def read_lines(log: str) -> list[Line]:
    """Returns the lines of a log as it is stored. A line without a time has that of the previous line."""
    lines: list[Line] = []
    latest: int | None = None
    for line in log.removesuffix("\n").split("\n") if log else []:
        if line.startswith(GAP):
            latest = None
            lines.append(_describe_gap(int(line.removeprefix(GAP))))
            continue
        time, text = split_stamp(line)
        latest = latest if time is None else time
        lines.append(Line(text, latest))
    return lines


def count_lines(lines: Iterable[Line]) -> int:
    """Returns how many lines the deploy has written so far."""
    return sum(line.stands_for for line in lines)


def skip_lines(lines: Sequence[Line], count: int) -> list[Line]:
    """Returns the lines after the first `count` ones, for a reader who has these."""
    left: list[Line] = []
    for line in lines:
        if count < line.stands_for:
            left.append(_describe_gap(line.stands_for - count) if count else line)
        count = max(0, count - line.stands_for)
    return left


def _describe_gap(missing: int) -> Line:
    return Line(f"… {missing:,} {'line is' if missing == 1 else 'lines are'} missing here", None, missing)
