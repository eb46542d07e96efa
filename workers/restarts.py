"""Starts the workers of a container again whenever they end, so that Caddy and the apps, which outlive them, go on.

`sites` has a process of its own, so that it goes on when the others end. The workers leave Caddy running, because the
next ones adopt it. When the container stops, this process stops Caddy after the workers, unless GATEWAY_KEEP_SERVING is
on.

Failure policy: a process that ends soon after its start is started again after a pause, so that a fault in every start
does not exhaust the machine. If the first one exits with an error soon after its start, or any one cannot run here
(`CannotRun`), the service cannot start, and this process exits with its code.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path

import structlog

from gateway import log
from gateway.operations.layout import EXIT_CODE
from gateway.settings import Settings
from workers.child import STOP_SECONDS, start_child
from workers.hosting import caddy

logger = structlog.get_logger()

TICK_SECONDS = 0.05  # between two checks of the processes
EARLY_SECONDS = 10.0  # after its start: if the process ends earlier, the next one waits
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 10.0  # of that wait, which doubles each time


class WorkerChild:
    """The process that does some work, and its successors."""

    def __init__(self, work: Callable[[], int]) -> None:
        self._work, self._is_first, self._pause = work, True, FIRST_PAUSE_SECONDS
        self._start_at = 0.0  # of the next process, on the monotonic clock
        self.process: BaseProcess | None = None

    def check(self, now: float) -> int:
        """Starts the process if there is none. Returns its exit code if the service cannot start, otherwise 0."""
        if self.process is None:
            if now >= self._start_at:
                self.process, self._started_at = start_child(_run, self._work), now
            return 0
        if self.process.is_alive():
            return 0
        exit_code, early = self.process.exitcode or 0, now - self._started_at < EARLY_SECONDS
        if exit_code == EXIT_CODE or (self._is_first and early and exit_code > 0):
            return exit_code
        logger.error("workers.restarted", exit_code=exit_code)
        self.process, self._is_first, self._start_at = None, False, now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS) if early else FIRST_PAUSE_SECONDS
        return 0


def keep_running(settings: Settings, works: Iterable[Callable[[], int]]) -> int:
    """Runs each work in a process, again whenever it ends, until this process is stopped. Returns the exit code."""
    log.configure(settings)
    stopping, exit_code = threading.Event(), 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    children = [WorkerChild(work) for work in works]
    while not exit_code and not stopping.wait(TICK_SECONDS):
        exit_code = max(child.check(time.monotonic()) for child in children)
    processes = [child.process for child in children if child.process is not None]
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(STOP_SECONDS)
        process.kill()
    if not settings.keep_serving:
        asyncio.run(caddy.stop(Path(settings.data_dir)))
    return exit_code


def _run(work: Callable[[], int]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    log.WRITER.forget_thread()
    return work()
