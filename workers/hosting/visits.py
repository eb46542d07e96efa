"""When previews were visited: what Caddy has logged since the last look. Caddy rolls the log, so it stays small."""

import os
from pathlib import Path

import msgspec


class _Request(msgspec.Struct):
    host: str


class _Line(msgspec.Struct):
    ts: float  # Unix time
    request: _Request


class VisitLog:
    def __init__(self, folder: Path) -> None:
        """`folder`: the data folder."""
        self._path = folder / "caddy" / "previews.log"
        self._file, self._offset = 0, 0  # the inode of the log, and how much of it has been read

    def read(self) -> dict[str, float]:
        """Returns the host names that were visited since the last call, with the Unix time of the last visit."""
        visits: dict[str, float] = {}
        try:
            with self._path.open("rb") as log:
                number = os.fstat(log.fileno()).st_ino
                log.seek(self._offset if number == self._file else 0)
                lines = log.readlines()
                if lines and not lines[-1].endswith(b"\n"):
                    lines.pop()  # Caddy is still writing it
                self._file, self._offset = number, (self._offset if number == self._file else 0) + sum(map(len, lines))
        except FileNotFoundError:
            return {}
        for line in lines:
            try:
                found = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError:
                continue
            visits[found.request.host.lower().partition(":")[0].rstrip(".")] = found.ts
        return visits
