"""Waits for a condition instead of sleeping."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


async def wait_until(condition: Callable[[], Any], timeout: float = 5, every: float = 0.02) -> Any:
    """Polls until the condition, plain or async, is truthy, and returns what it gave; seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(every)
