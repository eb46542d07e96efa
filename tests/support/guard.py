"""Ends every process that a test run has started when the run ends, even if it is killed.

A killed run cannot stop its servers, and some are made to outlive their parent: a Caddy outlives its worker. The run is
therefore a child of a guard, to which the kernel gives all orphans among the run's processes. The guard is in a session
of its own, so it survives a signal to the run's process group.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from workers.sandbox.network import PARENT_DIED, SUBREAPER, prctl

POLL_SECONDS = 0.01


def run_under_guard() -> None:
    """Returns in a new process, which continues the run. This one waits for its end, and exits as it did."""
    if sys.platform != "linux":
        return
    first = os.getpid()
    if (guard := os.fork()) == 0:
        prctl(SUBREAPER, 1)
        if (run := os.fork()) == 0:
            # A script's shell ignores Ctrl-C for what it runs in the background, and the processes of tests inherit it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return
        watch(run, first)
    for number in (signal.SIGINT, signal.SIGQUIT):  # the terminal sends them to the run, too
        signal.signal(number, signal.SIG_IGN)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]) & 0xFF)


def watch(run: int, first: int) -> NoReturn:
    """Waits until the run ends, or the process that started it, and kills all processes that are left."""
    signal.signal(signal.SIGTERM, lambda *_: end(128 + signal.SIGTERM))
    os.setsid()
    prctl(PARENT_DIED, signal.SIGTERM)
    if os.getppid() != first:
        end(128 + signal.SIGTERM)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == run:
            code = os.waitstatus_to_exitcode(status)
            end(code if code >= 0 else 128 - code)


def end(code: int) -> NoReturn:
    """Kills this process's children until there are none. Their own children then become children of this process."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(POLL_SECONDS)
    os._exit(code)
