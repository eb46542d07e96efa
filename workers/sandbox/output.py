"""The output of commands: its lines, without secrets.

All output of a build goes to the worker, as fast as that reads it: a build that prints more waits. The build's own
keeper searches for secrets.

The newest MiB of a start command's output stays on disk, with the time of each line, in two files that
`gateway/deploys/runtime_log.py` reads. When the current file is full, it replaces the former one. Both belong to the
owner of the data folder, so the gateway can read them, and other apps cannot.
"""

import codecs
import os
import select
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.deploys.line_times import FORMER, stamp_line

LINE_CHARACTERS = 4_096  # longer lines are split
FILE_BYTES = 524_288  # of each of the two files
BYTES_PER_SECOND = 65_536  # of a start command's output; the rest is dropped
WAITING_BYTES = 65_536  # of a build's output that wait for the worker; then the build waits too
FLUSH_SECONDS = 2.0  # that the worker has to read the end of the output
MIN_LINE_BYTES = 64  # that each line counts at least
CONCEALED_CHARACTERS = 8  # the shortest value that is hidden; hiding values such as "1" would hide half of a log
CONCEALED = "***"
MAX_SECRETS = 500  # of an app, the longest ones: each line is searched for every secret


class LineSplitter:
    """Splits the output of a command into lines of at most LINE_CHARACTERS characters.

    What follows a carriage return replaces what is before it, as in a terminal. So a progress bar leaves its last
    state.
    """

    def __init__(self) -> None:
        self._decoder, self._rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""

    def split(self, data: bytes) -> list[str]:
        """Returns the lines that the data completes. Empties data means the end and returns the rest."""
        *lines, rest = (self._rest + self._decoder.decode(data, final=not data)).split("\n")
        found = [piece for line in lines for piece in _cut(_overwrite(line).removesuffix("\r"))]
        rest = _overwrite(rest) if data else _overwrite(rest).removesuffix("\r")
        whole = len(rest) - len(rest) % LINE_CHARACTERS if data else len(rest)
        self._rest = rest[whole:]
        return [*found, *_cut(rest[:whole])] if whole else found


def _overwrite(line: str) -> str:
    """Returns the text after the last carriage return, except one at the end: a line feed may follow that."""
    written = line.rstrip("\r")
    return written.rpartition("\r")[2] + "\r" * (written != line)


def _cut(line: str) -> list[str]:
    return [line[at : at + LINE_CHARACTERS] for at in range(0, len(line) or 1, LINE_CHARACTERS)]


class Output:
    """The output of a start command, on its way to the two files."""

    def __init__(
        self, path: Path, conceal: Callable[[str], str] = str, *, bytes_per_second: int = BYTES_PER_SECOND
    ) -> None:
        """`conceal` hides secrets in a line."""
        self._path, self._conceal, self._bytes_per_second = path, conceal, bytes_per_second
        self._second, self._left, self._dropped = 0.0, 0, 0
        self._open()

    def _open(self) -> None:
        self._path.touch(mode=0o600)
        if os.geteuid() == 0:
            folder = self._path.parent.parent.stat()
            os.chown(self._path, folder.st_uid, folder.st_gid)
        self._file = self._path.open("ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size

    @property
    def full(self) -> bool:
        """Returns whether the rest of this second's output is dropped."""
        return self._left <= 0 and time.monotonic() - self._second < 1

    def drop(self, lines: int) -> None:
        self._dropped += lines

    def flush(self, seconds: float = 0) -> None:
        pass  # each line is written at once

    def write_line(self, line: str) -> None:
        now = time.monotonic()
        if now - self._second >= 1:
            self._second, self._left = now, self._bytes_per_second
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self._write(f"… {dropped} lines were dropped: too much output in one second")
        if self._left <= 0:
            self._dropped += 1
            return
        self._left -= max(len(line), MIN_LINE_BYTES)
        self._write(self._conceal(line))

    def _write(self, line: str) -> None:
        text = stamp_line(line, int(time.time() * 1000)).encode(errors="replace")
        try:
            if self._size + len(text) > FILE_BYTES:
                self._path.replace(_former(self._path))
                self._file.close()
                self._open()
            self._size += self._file.write(text) or 0
        except (OSError, ValueError):  # the disk is full, or was when the files were exchanged; the app keeps running
            self._dropped += 1


class StandardOutput(Output):
    """The output of a start command in a pod, on its way to the pod's log."""

    def __init__(self, conceal: Callable[[str], str]) -> None:
        super().__init__(Path("/dev/stdout"), conceal)

    def _open(self) -> None:
        pass

    def _write(self, line: str) -> None:
        text = line.encode(errors="replace") + b"\n"
        try:
            while text:
                text = text[os.write(1, text) :]
        except OSError:  # nobody reads the log; the app keeps running
            self._dropped += 1


class BuildOutput:
    """The output of a build, on its way to the worker."""

    def __init__(self, fd: int, conceal: Callable[[str], str]) -> None:
        """`fd`: a pipe. `conceal` hides secrets in a line."""
        os.set_blocking(fd, False)
        self._fd, self._conceal = fd, conceal
        self._waiting = bytearray()

    def write_line(self, line: str) -> None:
        self._waiting += self._conceal(line).encode(errors="replace") + b"\n"

    @property
    def full(self) -> bool:
        """Returns whether the worker must read before more output is taken."""
        return len(self._waiting) >= WAITING_BYTES

    def flush(self, seconds: float = 0) -> None:
        """Writes the waiting output. Waits at most `seconds` for the worker to read it."""
        ends, writable = time.monotonic() + seconds, select.poll()
        writable.register(self._fd, select.POLLOUT)
        while self._waiting:
            try:
                del self._waiting[: os.write(self._fd, self._waiting)]
            except BlockingIOError:
                if not writable.poll(max(0, ends - time.monotonic()) * 1_000):
                    return
            except OSError:  # the worker has ended
                self._waiting.clear()


def _former(path: Path) -> Path:
    return path.with_name(path.name + FORMER)


def make_concealer(variables: Mapping[str, str]) -> Callable[[str], str]:
    """Returns a function that hides the values in a line of output: the longest first, equally long ones in order.

    One search per secret takes time proportional to the line, whatever their contents. An alternation in one regular
    expression may compare every secret at every position.
    """
    lines = dict.fromkeys(line for value in variables.values() for line in value.splitlines())
    secrets = sorted((line for line in lines if len(line) >= CONCEALED_CHARACTERS), key=len, reverse=True)[:MAX_SECRETS]

    def conceal(line: str) -> str:
        for secret in secrets if len(line) >= CONCEALED_CHARACTERS else ():
            if secret in line:
                line = line.replace(secret, CONCEALED)
        return line

    return conceal
