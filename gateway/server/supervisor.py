"""Runs several gateway processes on one port, with a folder for their shared metrics.

    <temporary folder>/capsule-metrics-<random>/
        lock                     of the supervisor (`gateway/operations/temporary.py`)
        <type>_<number>.db       prometheus_client's values of one process

Processes are numbered, and a process takes the number of the one that it replaces. It continues that one's counters and
histograms, because a sum must not decrease. Gauges describe a state that has ended, so the supervisor removes them.

Failure policy: a process that ends, or does not respond, is replaced. If it ends soon after its start, its successor
starts after a pause, so that a fault in every process does not exhaust the machine. If a process exits before any of
them has served, or cannot use the data, the service cannot start and the supervisor exits, too. If the supervisor is
killed, its processes drain and exit, so that the port is free for the next supervisor.
"""

import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import structlog
import uvicorn

from gateway.loops import stop_at_hangup
from gateway.operations import layout
from gateway.operations.temporary import temporary_folder

logger = structlog.get_logger()

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # the variable from which prometheus_client reads the folder
PREFIX = "capsule-metrics-"

TICK_SECONDS = 0.25  # between two checks of the processes
ANSWER_SECONDS = 5.0  # within which a process must respond
START_SECONDS = 60.0  # within which it must begin to serve
EARLY_END_SECONDS = 10.0  # after its start: if a process ends earlier, its successor waits
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 10.0  # of that wait, which doubles each time
STOP_MARGIN_SECONDS = 10.0  # that a process has to exit after the time for its requests
CANNOT_START_EXIT = 3  # the exit code, as of uvicorn

SPAWN = multiprocessing.get_context("spawn")


class Child:
    """The process with a certain number, and its successors. Each calls `run`, with the arguments of `run_child`."""

    def __init__(
        self,
        number: int,
        config: uvicorn.Config,
        listeners: list[socket.socket],
        folder: Path,
        run: Callable[..., None],
    ) -> None:
        self._number, self._config, self._listeners, self._folder, self._run = number, config, listeners, folder, run
        self.process: SpawnProcess | None = None
        self._pipe: Connection
        self._started_at = self._asked_at = 0.0
        self._awaits_answer = self._has_answered = self.serves = False
        self._early_ends = 0  # processes in a row that ended early
        self._start_at = 0.0  # of the next process, on the monotonic clock

    def check(self, now: float) -> int | None:
        """Starts the process if there is none, and kills it if it hangs. Returns its exit code once it has ended."""
        if self.process is None:
            if now >= self._start_at:
                self._start(now)
        elif (exit_code := self.process.exitcode) is not None:
            self._note_end(now, self.process)
            return exit_code
        elif self.is_hanging(now):
            self.kill()
        return None

    def _start(self, now: float) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=self._run, args=(self._number, self._config, self._listeners, theirs))
        self._started_at = self._asked_at = now
        self._awaits_answer = self._has_answered = False
        try:
            process.start()
        except OSError as error:  # the machine has no processes or memory left
            logger.error("process.not_started", number=self._number, error=str(error))
            self._postpone(now)
        else:
            self.process = process
        finally:
            theirs.close()

    def is_hanging(self, now: float) -> bool:
        with suppress(OSError, EOFError):  # an exiting process has closed its pipe
            if self._awaits_answer and self._pipe.poll():
                self.serves = self._pipe.recv()
                self._awaits_answer, self._has_answered = False, True
            if not self._awaits_answer:
                self._pipe.send(None)
                self._asked_at, self._awaits_answer = now, True
        late = now - self._asked_at > (ANSWER_SECONDS if self._has_answered else START_SECONDS)
        return late or (not self.serves and now - self._started_at > START_SECONDS)

    def kill(self) -> None:
        if self.process is not None:
            logger.error("process.killed", number=self._number, pid=self.process.pid)
            self.process.kill()

    def _note_end(self, now: float, process: SpawnProcess) -> None:
        logger.error("process.ended", number=self._number, pid=process.pid, exit_code=process.exitcode)
        process.close()
        self._pipe.close()
        self.process, self.serves = None, False
        remove_gauges(self._folder, self._number)
        if now - self._started_at < EARLY_END_SECONDS:
            self._postpone(now)
        else:
            self._early_ends = 0

    def _postpone(self, now: float) -> None:
        self._start_at = now + min(FIRST_PAUSE_SECONDS * 2**self._early_ends, LONGEST_PAUSE_SECONDS)
        self._early_ends = min(self._early_ends + 1, 10)


def run_child(number: int, config: uvicorn.Config, listeners: list[socket.socket], pipe: Connection) -> None:
    """Runs one gateway process. Called in that process."""
    stop_at_hangup()
    from prometheus_client import values  # here, because it reads the folder's variable when it is imported

    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]
    config.configure_logging()  # again in this process, to turn off the access log
    server = uvicorn.Server(config)
    threading.Thread(target=answer_supervisor, args=(server, pipe), name="supervised", daemon=True).start()
    server.run(listeners)


def answer_supervisor(server: uvicorn.Server, pipe: Connection) -> None:
    try:
        while True:
            pipe.recv()
            pipe.send(server.started)
    except (OSError, EOFError):
        logger.error("supervisor.gone")
        os.kill(os.getpid(), signal.SIGTERM)


class Supervisor:
    def __init__(
        self,
        config: uvicorn.Config,
        listeners: list[socket.socket],
        folder: Path,
        announce: Callable[[], None],
        run: Callable[..., None] = run_child,
    ) -> None:
        """`announce` is called when the first process serves. Each process calls `run`."""
        self._announce = announce
        self._children = [Child(number, config, listeners, folder, run) for number in range(config.workers)]
        self._grace = (config.timeout_graceful_shutdown or 0) + STOP_MARGIN_SECONDS
        self._stopping = self._has_served = False

    def run(self) -> int:
        """Runs until it is stopped. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        exit_code = 0
        while not self._stopping:
            for child in self._children:
                if child.serves and not self._has_served:
                    self._has_served = True
                    self._announce()
                ended_with = child.check(time.monotonic()) or 0
                if ended_with == layout.EXIT_CODE:
                    exit_code, self._stopping = layout.EXIT_CODE, True
                elif ended_with > 0 and not self._has_served:
                    exit_code, self._stopping = CANNOT_START_EXIT, True
            time.sleep(TICK_SECONDS)
        self._end_all()
        return exit_code

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _end_all(self) -> None:
        for child in self._children:
            if child.process is not None:
                child.process.terminate()
        give_up = time.monotonic() + self._grace
        while running := [c for c in self._children if c.process is not None and c.process.exitcode is None]:
            now = time.monotonic()
            for child in running:
                if now > give_up or child.is_hanging(now):
                    child.kill()
            time.sleep(TICK_SECONDS)


def remove_gauges(folder: Path, number: int) -> None:
    for path in folder.glob(f"gauge_live*_{number}.db"):
        path.unlink(missing_ok=True)


def metrics_folder() -> AbstractContextManager[Path]:
    """Makes an empty folder, which is removed after the context."""
    return temporary_folder(Path(tempfile.gettempdir()), PREFIX)
