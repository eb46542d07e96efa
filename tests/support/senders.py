"""Runs the worker that sends events and notices in the process of the test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from gateway.settings import Settings
from tests.support.background import cancel
from tests.support.processes import ENCRYPTION_KEY
from tests.support.worker_process import Queue
from workers.webhooks.sender import run


@contextlib.asynccontextmanager
async def sending(queue: Queue, workers: int = 1, **settings: Any) -> AsyncIterator[None]:
    """Runs so many workers on the queue. `settings` are fields of `Settings`."""
    defaults = {"encryption_key": ENCRYPTION_KEY, "allow_private_addresses": True, "webhook_claim_idle": 10.0}
    chosen = Settings(redis_url=queue.url, **{**defaults, **settings})
    tasks = [asyncio.create_task(run(chosen)) for _ in range(workers)]
    try:
        yield
    finally:
        await cancel(*tasks)
