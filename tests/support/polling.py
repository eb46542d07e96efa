"""Waits for a condition instead of sleeping."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def wait_until(condition: Callable[[], Any], timeout: float = 5, every: float = 0.02) -> Any:
    """Polls the condition, which may be async, until it is truthy, and returns its value. Times are in seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if loop.time() > deadline:
            raise AssertionError(f"not within {timeout} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(every)
