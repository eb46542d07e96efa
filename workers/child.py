"""Runs a worker in a process of its own, which ends with its parent."""

import asyncio
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from gateway.cancellation import finish_despite_cancellation
from gateway.operations.layout import EXIT_CODE, CannotRun

STOP_SECONDS = 60.0  # in which a child process must end; a host that stops keeps its apps' data first


def start_child(work: Callable[..., int], *args: Any) -> BaseProcess:
    """Starts the work, which returns the exit code, in a child process.

    There must be no event loop yet, because a fork would share it.
    """
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    child: BaseProcess = context.Process(target=_run_and_exit, args=(work, *args))  # type: ignore[attr-defined]
    child.start()
    return child


def _run_and_exit(work: Callable[..., int], *args: Any) -> NoReturn:
    sys.exit(work(*args))  # a child process ends with 0 otherwise, whatever its work returns


async def keep_child(child: BaseProcess) -> NoReturn:
    """Stops the child when canceled. Raises RuntimeError when it ends by itself, or CannotRun if it cannot run here."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(child.sentinel, ended.set)
    try:
        await ended.wait()
        await asyncio.to_thread(child.join)
        if child.exitcode == EXIT_CODE:
            raise CannotRun("The other workers of this process end with `sites`, which cannot run here.")
        raise RuntimeError("a child process ended unexpectedly; its log has the reason")
    finally:
        loop.remove_reader(child.sentinel)
        child.terminate()
        await finish_despite_cancellation(asyncio.to_thread(child.join, STOP_SECONDS))
        child.kill()


def stop_with_parent(stopped: asyncio.Event) -> None:
    """Sets the event when the parent of a child process ends. Does nothing in other processes."""
    if (parent := multiprocessing.parent_process()) is None:
        return
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(parent.sentinel)  # otherwise the loop would call this without a pause until the process ends
        stopped.set()

    loop.add_reader(parent.sentinel, stop)
