"""Logs one line per event: JSON for machines, colors for a terminal. Never log a prompt, an answer, a token or a key.

Lines for a file are written at once. Lines for a pipe or a terminal are written by a thread, because a write to a
standard output that is not read blocks. The queue of the thread has a limit. Beyond it, lines are dropped and counted,
and in their place a line `log.dropped` has their number.
"""

import atexit
import datetime
import logging
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import msgspec
import structlog

from gateway.settings import Settings

QUEUE_BYTES = 4_194_304  # of lines to be written: about ten thousand lines
GATHER_SECONDS = 0.02  # from the first line to the write, so that a busy process rarely wakes the thread
DRAIN_SECONDS = 2.0  # at the end of the process
ATOMIC_BYTES = 4096  # of one write to a pipe, so that the lines of several processes do not mix (PIPE_BUF)


# -- the writer ----------------------------------------------------------------------------------------------


class LineWriter:
    """A non-blocking log file. Each call of `write` gets whole lines; any thread may call it."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._is_file = False
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # of the lines that are queued or being written
        self._dropped = 0  # lines since the last report
        self._full = False
        self._write_through = False
        self._awake = False
        self._wake = threading.Event()
        # Reentrant, because a signal handler or a finalizer may log while its own thread holds it.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self.on_drop: Callable[[int], None] = lambda _: None

    def open(self, descriptor: int) -> None:
        """Writes to a copy of the descriptor from now on. The original may be closed, and its number reused."""
        with self._lock:
            self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if self._thread is None:
                self._descriptor = os.dup(descriptor)
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
                atexit.register(self.finish)
            else:
                os.dup2(descriptor, self._descriptor, inheritable=False)  # atomic, whatever the thread does

    def forget_thread(self) -> None:
        """Starts anew in a forked process, which has none of its parent's threads. `open` then starts one."""
        descriptor = self._descriptor
        LineWriter.__init__(self)
        if descriptor >= 0:
            os.close(descriptor)

    def write(self, text: str | bytes) -> None:
        line = text if isinstance(text, bytes) else text.encode(errors="replace")
        if self._is_file:
            with self._lock:
                if self._write_all(line):
                    self.on_drop(1)
            return
        with self._lock:
            # Once full, half of the queue must be written before it accepts lines again, so that gaps are few.
            if self._bytes + len(line) > (QUEUE_BYTES // 2 if self._full else QUEUE_BYTES):
                self._full = True
                self._dropped += 1
                self.on_drop(1)
                return
            if self._full:
                self._full = False
                self._append_report()
            self._append(line)
        if not self._awake:
            self._awake = True
            self._wake.set()
        if self._write_through:
            self._write_through = self.drain(DRAIN_SECONDS / 4)

    def flush(self) -> None:
        """Does nothing. Loggers call it after each line."""

    def drain(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Waits until all lines are written. Returns False if that takes longer than `seconds`."""
        until = time.monotonic() + seconds
        while self._bytes:
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def finish(self) -> None:
        """Writes the queued lines, for two seconds at most. Later lines are written at once, while that succeeds."""
        self._write_through = self.drain()

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._bytes += len(line)

    def _append_report(self) -> None:
        self._append(_report_dropped(self._dropped))
        self._dropped = 0

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wake.wait():
            self._wake.clear()
            time.sleep(GATHER_SECONDS)
            self._awake = False
            while batch := self._take():
                self._write_batch(batch)

    def _take(self) -> list[bytes]:
        """Returns the lines for one write: as many as a write to a shared pipe keeps together."""
        with self._lock:
            if not self._lines and self._dropped:
                self._full = False
                self._append_report()
            batch: list[bytes] = []
            size = 0
            while self._lines and (not batch or size + len(self._lines[0]) <= ATOMIC_BYTES):
                batch.append(line := self._lines.popleft())
                size += len(line)
            return batch

    def _write_batch(self, batch: list[bytes]) -> None:
        data = b"".join(batch)
        error = self._write_all(data)
        with self._lock:
            self._bytes -= len(data)
            if error:
                self.on_drop(len(batch))  # the log itself cannot report it

    def _write_all(self, data: bytes) -> OSError | None:
        while data:
            try:
                written = os.write(self._descriptor, data)
            except BlockingIOError:  # another process made the pipe or the terminal non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll(1000)
            except OSError as error:
                return error
            else:
                data = data[written:]
        return None


WRITER = LineWriter()


# -- the lines -----------------------------------------------------------------------------------------------


class RequestLine(msgspec.Struct, kw_only=True, gc=False):
    """The log line of an inference request. Durations are in milliseconds."""

    request_id: str
    app: str
    format: str  # of `formats/endpoints.py`; empty while unknown
    model: str
    status: int
    code: str
    input_tokens: int | None
    output_tokens: int | None
    nano_euro: int
    ttft_ms: float | None
    duration_ms: float
    provider_status: int | None = None  # the status of the provider's answer; None if there was no answer
    event: str = "request"
    level: str = "info"
    timestamp: datetime.datetime = msgspec.field(default_factory=partial(datetime.datetime.now, datetime.UTC))


def write_request_line(line: RequestLine) -> None:
    """Writes JSON without structlog's processors, which cost as much as relaying one or two tokens."""
    if _fast_lines:
        WRITER.write(msgspec.json.encode(line) + b"\n")
    else:
        fields = msgspec.to_builtins(line)
        del fields["level"], fields["timestamp"]
        structlog.get_logger().info(**fields)


_fast_lines = False


def origin_of(error: BaseException) -> str:
    """Returns the type of an error and the line that raised it. Its message is left out: it could hold content."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    line = f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame is not None else ""
    return type(error).__name__ + line


def _json(_: Any, __: str, event: MutableMapping[str, Any]) -> bytes:
    return msgspec.json.encode(event, enc_hook=repr)


def _with_trace(logger: Any, name: str, event: MutableMapping[str, Any]) -> bytes:
    if "exc_info" in event:
        structlog.processors.format_exc_info(logger, name, event)
    return _json(logger, name, event)


def _console() -> structlog.dev.ConsoleRenderer:
    # The default formatter also prints the values of local variables, which may be secret.
    return structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback)


def _report_dropped(lines: int) -> bytes:
    event = {
        "event": "log.dropped",
        "lines": lines,
        "level": "warning",
        "timestamp": datetime.datetime.now(datetime.UTC),
    }
    return msgspec.json.encode(event) + b"\n"


def _open_standard_output() -> None:
    try:
        WRITER.open(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # there is no standard output, or it is closed
        with open(os.devnull, "wb") as nothing:
            WRITER.open(nothing.fileno())


def configure(settings: Settings) -> None:
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    before: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    text = settings.log_format == "text"
    global _fast_lines
    _fast_lines = not text and level <= logging.INFO
    _open_standard_output()
    file: Any = WRITER
    structlog.configure(
        processors=[*before, _console() if text else _with_trace],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file) if text else structlog.BytesLoggerFactory(file),
        cache_logger_on_first_use=True,
    )
    # Libraries use the standard module and get the same format. httpx logs URLs, which may contain secrets, at INFO, so
    # only its warnings pass.
    handler = logging.StreamHandler(file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _console() if text else lambda *event: _json(*event).decode(),
            ],
            foreign_pre_chain=[*before, structlog.processors.format_exc_info],
        )
    )
    logging.basicConfig(handlers=[handler], level=level, force=True)
    for name in ("httpx", "httpcore", "httpx2", "httpcore2", "markdown_it"):
        logging.getLogger(name).setLevel(logging.WARNING)
