"""Preserves cancellations that a library would lose, protects work that must not be interrupted, and ends tasks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def end_if_canceled() -> None:
    """Raises CancelledError if the current task was canceled. Loops that run as long as their task call it.

    redis-py sends with `asyncio.wait_for`, which in Python 3.11 loses a cancellation at the moment when it returns. The
    loop would go on, and its process would not stop.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def finish_despite_cancellation(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end even if this task is canceled, and raises CancelledError afterwards."""
    task, canceled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            canceled = True
        except Exception:  # `result` raises it below
            break
    if canceled:
        task.exception()
        raise asyncio.CancelledError
    return task.result()


async def run_in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs the work in a thread, and waits for its end even if canceled, because the next step relies on its end."""
    return await finish_despite_cancellation(asyncio.to_thread(work, *args, **kwargs))


async def run_process(*command: str | Path, seconds: float, **options: Any) -> tuple[int, bytes]:
    """Runs a process. Returns its exit status, and what it has written to stderr if `options` make a pipe of that.

    If it takes too long or this task is canceled, it is killed. Raises TimeoutError.
    """
    process = await asyncio.create_subprocess_exec(*command, **{"stdin": asyncio.subprocess.DEVNULL} | options)
    try:
        async with asyncio.timeout(seconds):
            _, error = await process.communicate()
    except BaseException:
        with suppress(ProcessLookupError):  # it has just ended
            process.kill()
        await finish_despite_cancellation(process.wait())
        raise
    return process.returncode or 0, error or b""


@asynccontextmanager
async def run_in_background(work: Coroutine[object, object, object]) -> AsyncIterator[asyncio.Task[object]]:
    """Runs `work` until the context is left. What it raises is only in the task."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        await cancel(task)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks, and waits until they have ended in any way."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RunningTasks(dict[Hashable, asyncio.Task[None]]):
    """Tasks by their names. Each leaves when it is done."""

    def start(self, work: Coroutine[Any, Any, None], name: Hashable = None) -> None:
        """Begins the work, unless work of this name is running. Without a name, it begins anyway."""
        if name in self:
            return work.close()
        task = asyncio.create_task(work)
        key = task if name is None else name
        self[key] = task
        task.add_done_callback(lambda _: self.pop(key, None))

    async def cancel(self) -> None:
        await cancel(*self.values())
