"""Starts the workers of a container again whenever they end, so that Caddy and the apps, which outlive them, go on.

The workers run in one child process. They leave Caddy running when they stop, because the next workers adopt it. When
the container stops, this process stops Caddy after the workers, unless GATEWAY_KEEP_SERVING is on.

Failure policy: workers that end soon after their start are started again after a pause, so that a fault in every start
does not exhaust the machine. If the first workers exit with an error soon after their start, the service cannot start,
and this process exits with their code.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from gateway import log
from gateway.settings import Settings
from workers.child import STOP_SECONDS, start_child
from workers.hosting import caddy

logger = structlog.get_logger()

EARLY_SECONDS = 10.0  # after its start: if the process ends earlier, the next one waits
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 10.0  # of that wait, which doubles each time


def keep_running(settings: Settings, work: Callable[[], int]) -> int:
    """Runs `work` in a child process, again whenever it ends, until SIGTERM or SIGINT. Returns the exit code."""
    log.configure(settings)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    pause, first = FIRST_PAUSE_SECONDS, True
    while not stopping.is_set():
        began, child = time.monotonic(), start_child(_work, work)
        while child.is_alive() and not stopping.wait(0.05):
            pass
        if stopping.is_set():
            child.terminate()
            child.join(STOP_SECONDS)
            child.kill()
            break
        early, exit_code = time.monotonic() - began < EARLY_SECONDS, child.exitcode or 0
        if first and early and exit_code > 0:
            return exit_code
        first = False
        logger.error("workers.restarted", exit_code=exit_code)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS) if early else FIRST_PAUSE_SECONDS
        stopping.wait(pause)
    if not settings.keep_serving:
        asyncio.run(caddy.stop(Path(settings.data_dir)))
    return 0


def _work(work: Callable[[], int]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    log.WRITER.forget_thread()
    os.environ["GATEWAY_KEEP_SERVING"] = "on"
    sys.exit(work())
