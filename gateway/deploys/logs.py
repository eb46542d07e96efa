"""Logs of deploys that have ended: one compressed object in the storage per deploy, in a folder per day.

    logs/<day on which the deploy was queued>/<deploy id>.gz

Redis has a log only while its deploy is in progress (`states.py`). This module handles the objects, and the times of
lines.
"""

import contextlib
import datetime
import gzip

from gateway.storage import Storage, read_object

KEPT_DAYS = 90
MARK = "\x1f"  # between the time of a line, in ms, and its text; no line of a build contains it
PACKED_BYTES = 1_048_576  # to read at most; more than the longest log


class DeployLogs:
    """Every method raises StorageUnavailable."""

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
