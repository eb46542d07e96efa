"""Several gateway processes on one port, and the folder through which they share their metrics.

    <temporary folder>/capsule-metrics-<random>/
        lock                     held by the supervisor for its life: a folder without a holder is a leftover
        <type>_<number>.db       prometheus_client's figures of one process

Processes are numbered, and a process takes the number of the one that it replaces. It goes on with that one's counters
and histograms, because a sum must not decrease. The gauges tell of a state that is no more, so the supervisor removes
them.

Failure policy: a process that ended, or that does not answer, is replaced. If it ended soon after its start, its
successor waits, so that a fault that ends each of them does not use up the machine. If the first processes exit before
any of them served, the service cannot start and the supervisor exits too. Processes whose supervisor was killed drain
and end, so they leave the port to the next one.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import structlog
import uvicorn

logger = structlog.get_logger()

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # the variable in which prometheus_client expects the folder
PREFIX = "capsule-metrics-"

TICK = 0.25  # seconds between two looks at the processes
PATIENCE = 5.0  # seconds in which a process must answer,
START_PATIENCE = 60.0  # and in which it must begin to serve
SOON = 10.0  # seconds: a process that ends earlier makes its successor wait
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds of that wait, which doubles each time
STOP_MARGIN = 10.0  # seconds that a process has to end, beyond what it grants its requests
CANNOT_START = 3  # exit code, as uvicorn's

SPAWN = multiprocessing.get_context("spawn")


class Child:
    """The process with one of the numbers, and its successors."""

    def __init__(self, number: int, config: uvicorn.Config, listener: socket.socket, folder: Path) -> None:
        self._number, self._config, self._listener, self._folder = number, config, listener, folder
        self.process: SpawnProcess | None = None
        self._pipe: Connection
        self._started_at = self._asked_at = 0.0
        self._awaits_answer = self._has_answered = self.serves = False
        self._soon_ended = 0  # processes in a row
        self._start_at = 0.0  # of the next process, on the monotonic clock

    def check(self, now: float) -> None:
        """Starts a process if there is none, kills one that hangs, and notices the end of one."""
        if self.process is None:
            if now >= self._start_at:
                self._start(now)
        elif self.process.exitcode is not None:
            self._note_end(now, self.process)
        elif self.hangs(now):
            self.kill()

    def _start(self, now: float) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=run_child, args=(self._number, self._config, self._listener, theirs))
        self._started_at = self._asked_at = now
        self._awaits_answer = self._has_answered = False
        try:
            process.start()
        except OSError as error:  # the machine has no process or memory left
            logger.error("process.not_started", number=self._number, error=str(error))
            self._postpone(now)
        else:
            self.process = process
        finally:
            theirs.close()

    def hangs(self, now: float) -> bool:
        try:
            if self._awaits_answer and self._pipe.poll():
                self.serves = self._pipe.recv()
                self._awaits_answer, self._has_answered = False, True
            if not self._awaits_answer:
                self._pipe.send(None)
                self._asked_at, self._awaits_answer = now, True
        except (OSError, EOFError):
            return True  # it is about to end
        late = now - self._asked_at > (PATIENCE if self._has_answered else START_PATIENCE)
        return late or (not self.serves and now - self._started_at > START_PATIENCE)

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
        if now - self._started_at < SOON:
            self._postpone(now)
        else:
            self._soon_ended = 0

    def _postpone(self, now: float) -> None:
        self._start_at = now + min(FIRST_PAUSE * 2**self._soon_ended, LONGEST_PAUSE)
        self._soon_ended = min(self._soon_ended + 1, 10)


class Supervisor:
    def __init__(self, config: uvicorn.Config, listener: socket.socket, folder: Path) -> None:
        self._children = [Child(number, config, listener, folder) for number in range(config.workers)]
        self._grace = (config.timeout_graceful_shutdown or 0) + STOP_MARGIN
        self._stopping = self._has_served = False

    def run(self) -> int:
        """Runs until SIGTERM or SIGINT. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        exit_code = 0
        while not self._stopping:
            for child in self._children:
                self._has_served |= child.serves
                if not self._has_served and child.process is not None and (child.process.exitcode or 0) > 0:
                    exit_code, self._stopping = CANNOT_START, True
                child.check(time.monotonic())
            time.sleep(TICK)
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
                if now > give_up or child.hangs(now):
                    child.kill()
            time.sleep(TICK)


def run_child(number: int, config: uvicorn.Config, listener: socket.socket, pipe: Connection) -> None:
    """The life of one process, in that process."""
    from prometheus_client import values  # it reads the folder's variable when it is imported

    values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]
    config.configure_logging()  # again: it silences the access log
    server = uvicorn.Server(config)
    threading.Thread(target=answer_supervisor, args=(server, pipe), name="supervised", daemon=True).start()
    server.run([listener])


def answer_supervisor(server: uvicorn.Server, pipe: Connection) -> None:
    try:
        while True:
            pipe.recv()
            pipe.send(server.started)
    except (OSError, EOFError):
        logger.error("supervisor.gone")
        os.kill(os.getpid(), signal.SIGTERM)


def remove_gauges(folder: Path, number: int) -> None:
    for path in folder.glob(f"gauge_live*_{number}.db"):
        path.unlink(missing_ok=True)


@contextmanager
def metrics_folder() -> Iterator[Path]:
    """An empty folder, which is removed afterwards. If that fails because of a SIGKILL, the next start removes it."""
    _remove_leftovers(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, (Path(name) / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / "lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, or not ours to remove
