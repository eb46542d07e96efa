"""Reads the output of an app's start command, which the worker that runs it writes to disk.

    GATEWAY_DATA_DIR/running/<deploy id>.output         the latest output
    GATEWAY_DATA_DIR/running/<deploy id>.output.former  the output before it; replaced when the other file is full

Each line begins with its time (`line_times.py`). Together the files have at most 1 MiB (`workers/sandbox/output.py`).
"""

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from gateway.accounts.records import App
from gateway.deploys.line_times import FORMER, split_stamp
from gateway.ids import ALWAYS, TimeSpan

POLL_SECONDS = 0.5
DEPLOY_SECONDS = 2.0  # between two checks of which deploy is live
FIRST_BYTES = 64  # of a file, with the time of its first line
ATTEMPTS = 5  # to read both files while they are swapped
MISSING = "… lines are missing here: they were written faster than they were read\n".encode()


File = tuple[int, bytes]  # its inode, which a later file may have too, and its first bytes
Position = tuple[File | None, int]  # an offset in a file


class RuntimeLog:
    def __init__(
        self, data_dir: str, *, poll_seconds: float = POLL_SECONDS, deploy_seconds: float = DEPLOY_SECONDS
    ) -> None:
        self._folder = Path(data_dir) / "running"
        self._poll_seconds, self._deploy_seconds = poll_seconds, deploy_seconds

    async def has_start_command(self, app: App, live: str | None) -> bool:
        """Returns whether the app has a start command, or has run one here that its build recognized.

        `live` is the id of the app's live deploy.
        """
        if app.build is not None:
            return app.build.start is not None
        return live is not None and (self._folder / f"{live}.output").exists()

    async def tail(self, deploy_id: str, lines: int, span: TimeSpan = ALWAYS) -> list[str]:
        """Returns the last complete lines of the span. Empty if there are none, or the app does not run here."""
        text, _ = await asyncio.to_thread(self._read, self._folder / f"{deploy_id}.output")
        return _lines(text, span)[-lines:]

    async def follow(
        self,
        find_deploy: Callable[[], Awaitable[str | None]],
        lines: int,
        until: Callable[[], bool],
        span: TimeSpan = ALWAYS,
    ) -> AsyncGenerator[list[str]]:
        """Yields the last lines of the span, then new ones as they are written, until `until` returns true.

        An empty list means that there are no new lines yet. `find_deploy` returns the id of the app's live deploy. When
        it changes, all output of the new deploy follows.
        """
        deploy_id: str | None = None
        reader, checked_at = _Reader(self._folder / "none"), 0.0
        while not until():
            if time.monotonic() - checked_at > self._deploy_seconds:
                checked_at, now = time.monotonic(), await find_deploy()
                if now != deploy_id and now is not None:
                    text, position = await asyncio.to_thread(self._read, self._folder / f"{now}.output")
                    reader = _Reader(self._folder / f"{now}.output", position)
                    yield _lines(text, span)[-lines if deploy_id is None else 0 :]
                    deploy_id = now
            yield await asyncio.to_thread(reader.read)
            await asyncio.sleep(self._poll_seconds)

    @staticmethod
    def _read(path: Path) -> tuple[bytes, Position]:
        """Returns the complete lines of both files, and their end."""
        for _ in range(ATTEMPTS):
            current, text = _read_file(path)
            former, before = _read_file(path.with_name(path.name + FORMER))
            if current is None or former != current:  # else the files were swapped in between
                break
        complete = _complete(text)
        return before + complete, (current, len(complete))


class _Reader:
    """Reads on from the end of the last read, even after the files were swapped."""

    def __init__(self, path: Path, position: Position = (None, 0)) -> None:
        self._path = path
        self._file, self._offset = position

    def read(self) -> list[str]:
        before, (file, text) = b"", _read_file(self._path, self._offset, expected=self._file)
        if file != self._file:
            former, rest = _read_file(self._path.with_name(self._path.name + FORMER), self._offset, expected=self._file)
            if self._file is not None and former == self._file:
                before = rest
            elif self._offset and file is not None:  # the files were swapped twice since the last read
                before = MISSING
            self._file, self._offset = file, 0
        text = _complete(text)
        self._offset += len(text)
        return _lines(before + text)


def _complete(text: bytes) -> bytes:
    """Returns the text without a last line that is still being written."""
    return text[: text.rfind(b"\n") + 1]


def _lines(text: bytes, span: TimeSpan = ALWAYS) -> list[str]:
    """Returns the lines of the span. One without a time has that of the previous line."""
    found, at = [], -math.inf
    for stamped in text.decode(errors="replace").split("\n")[:-1]:
        time_ms, line = split_stamp(stamped)
        at = at if time_ms is None else time_ms / 1000
        if span.contains(at):
            found.append(line)
    return found


def _read_file(path: Path, offset: int = 0, expected: File | None = None) -> tuple[File | None, bytes]:
    """Returns which file it is (None if there is none), and the bytes. The offset applies only to the expected file."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_ino, file.readline(FIRST_BYTES)
            file.seek(offset if found == expected else 0)
            return found, file.read()
    except OSError:
        return None, b""
