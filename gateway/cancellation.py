"""Cancellation that asyncio or a library would lose, and work that must not be cut short by it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def end_if_canceled() -> None:
    """For loops that run as long as their task. redis-py sends with `asyncio.wait_for`, which in Python 3.11 loses a
    cancellation that comes in the moment in which it ends: the loop would go on, and its process would not stop."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def finish_despite_cancellation(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end even if this task is canceled, and raises the cancellation afterwards."""
    task, canceled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            canceled = True
        except Exception:  # it is `result` that raises it
            break
    if canceled:
        task.exception()
        raise asyncio.CancelledError
    return task.result()
