"""Runs work while a test goes on."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks, and waits until they have ended in any way."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Cancels the work at the end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        await cancel(task)
