"""The output of a start command: at most 1 MiB on disk, of which the newest stays.

It is two files (`gateway/deploys/runtime_log.py` reads them). When the current one is full, it replaces the former one.
They belong to the owner of the data folder, so that the gateway may read them; no other app may.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from gateway.deploys.runtime_log import FORMER

FILE_BYTES = 524_288  # of each of the two files
# A flood of output costs no more than this.
BYTES_PER_SECOND = 65_536
LINE_BYTES = 64  # that a line counts at least
CONCEALED_LENGTH = 8  # characters; to hide shorter values, such as "1", would hide half of a log
CONCEALED = "***"


class Output:
    def __init__(self, path: Path, conceal: Callable[[str], str] = str) -> None:
        """`conceal` hides secrets in a line."""
        self._path, self._conceal = path, conceal
        self._size = 0
        self._second, self._left, self._dropped = 0.0, 0, 0

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _open(self) -> None:
        self._path.touch(mode=0o600)
        if os.geteuid() == 0:
            folder = self._path.parent.parent.stat()
            os.chown(self._path, folder.st_uid, folder.st_gid)
        self._file = self._path.open("ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size

    def write_line(self, line: str) -> None:
        now = time.monotonic()
        if now - self._second >= 1:
            self._second, self._left = now, BYTES_PER_SECOND
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self._write(f"… {dropped} lines were left out: too much output in a second")
        if self._left <= 0:
            self._dropped += 1
            return
        self._left -= max(len(line), LINE_BYTES)
        self._write(self._conceal(line))

    def _write(self, line: str) -> None:
        text = line.encode(errors="replace") + b"\n"
        try:
            if self._size + len(text) > FILE_BYTES:
                self._path.replace(_former(self._path))
                self._file.close()
                self._open()
            self._size += self._file.write(text) or 0
        except (OSError, ValueError):  # the disk is full, or was when the file was exchanged: the app itself goes on
            self._dropped += 1


def remove_output(path: Path) -> None:
    path.unlink(missing_ok=True)
    _former(path).unlink(missing_ok=True)


def _former(path: Path) -> Path:
    return path.with_name(path.name + FORMER)


def concealer(variables: Mapping[str, str]) -> Callable[[str], str]:
    """Returns a function that hides the values in a line of output, the longest first."""
    lines = {line for value in variables.values() for line in value.splitlines()}
    secrets = sorted((line for line in lines if len(line) >= CONCEALED_LENGTH), key=len, reverse=True)

    def conceal(line: str) -> str:
        for secret in secrets:
            if secret in line:
                line = line.replace(secret, CONCEALED)
        return line

    return conceal
