"""Waits for a condition instead of sleeping."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 5.0  # for what takes milliseconds, and far more on a machine that is busy with other tests


async def wait_until(
    read: Callable[[], Any], timeout: float = 30, every: float = 0.02, *, holds: Callable[[Any], object] = bool
) -> Any:
    """Polls a value until a condition holds for it, by default that it is truthy, and returns it.

    `read` may be async. Times are in seconds. The pauses grow, so that long waits leave the processor to the processes.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        value = read()
        if inspect.isawaitable(value):
            value = await value
        if holds(value):
            return value
        waited = loop.time() - began
        if waited > timeout:
            raise AssertionError(f"not within {timeout} s: {inspect.getsource(read).strip()}; it is {value!r:.500}")
        await asyncio.sleep(max(every, min(waited / 10, 0.1)))
