"""The output of an app's start command, as the worker that runs it keeps it on disk:

    GATEWAY_DATA_DIR/running/<deploy id>.output         what came last
    GATEWAY_DATA_DIR/running/<deploy id>.output.former  what came before; replaced when the other one is full

Together they have at most 1 MiB (`workers/sandbox/output.py`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

POLL_INTERVAL = 0.5  # seconds
DEPLOY_INTERVAL = 2.0  # seconds between two looks at which deploy is live
FORMER = ".former"
ATTEMPTS = 5  # to read both files while they are exchanged


class RuntimeLog:
    def __init__(self, data_dir: str) -> None:
        self._folder = Path(data_dir) / "running"
        self.followers: Counter[str] = Counter()  # of this process, by account

    async def tail(self, deploy_id: str, lines: int) -> list[str]:
        """The last lines, of those that are complete. Empty if nothing was written, or the app does not run here."""
        text, _ = await asyncio.to_thread(self._read, self._folder / f"{deploy_id}.output")
        return text.decode(errors="replace").split("\n")[:-1][-lines:]

    async def follow(
        self, find_deploy: Callable[[], Awaitable[str | None]], lines: int, until: Callable[[], bool]
    ) -> AsyncGenerator[list[str]]:
        """The last lines, then new ones as they come, until `until` says so. An empty list: there are none yet.

        `find_deploy` returns the id of the app's live deploy; when it changes, all output of the new one follows.
        """
        deploy_id: str | None = None
        reader, looked = _Reader(self._folder / "none"), 0.0
        while not until():
            if time.monotonic() - looked > DEPLOY_INTERVAL:
                looked, now = time.monotonic(), await find_deploy()
                if now != deploy_id and now is not None:
                    text, position = await asyncio.to_thread(self._read, self._folder / f"{now}.output")
                    reader = _Reader(self._folder / f"{now}.output", position)
                    yield text.decode(errors="replace").split("\n")[:-1][-lines if deploy_id is None else 0 :]
                    deploy_id = now
            yield await asyncio.to_thread(reader.read)
            await asyncio.sleep(POLL_INTERVAL)

    @staticmethod
    def _read(path: Path) -> tuple[bytes, tuple[int, int]]:
        """What is complete in both files, and where it ends: inode and offset."""
        for _ in range(ATTEMPTS):
            inode, text = _read_file(path)
            former_inode, former = _read_file(path.with_name(path.name + FORMER))
            if inode == 0 or former_inode != inode:  # else they were exchanged in between
                break
        complete = text[: text.rfind(b"\n") + 1]
        return former + complete, (inode, len(complete))


class _Reader:
    """Reads on where the last read ended, when the files were exchanged too."""

    def __init__(self, path: Path, position: tuple[int, int] = (0, 0)) -> None:
        self._path = path
        self._inode, self._offset = position

    def read(self) -> list[str]:
        inode, text = _read_file(self._path, self._offset, expected=self._inode)
        if inode != self._inode:
            former_inode, rest = _read_file(
                self._path.with_name(self._path.name + FORMER), self._offset, expected=self._inode
            )
            before = rest if former_inode == self._inode and self._inode else b""
            self._inode, self._offset = inode, 0
            text = text[: text.rfind(b"\n") + 1]
            self._offset = len(text)
            return (before + text).decode(errors="replace").split("\n")[:-1]
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        return text.decode(errors="replace").split("\n")[:-1]


def _read_file(path: Path, offset: int = 0, expected: int = 0) -> tuple[int, bytes]:
    """Inode and bytes of the file, 0 if there is none. The offset counts only in the expected file."""
    try:
        with path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode == expected:
                file.seek(offset)
            return inode, file.read()
    except OSError:
        return 0, b""
