"""Runs the worker that sends events and notices in the process of the test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

from gateway.settings import Settings
from tests.support.background import cancel
from tests.support.processes import ENCRYPTION_KEY
from tests.support.worker_process import Queue
from workers.webhooks.mailer import Mailer
from workers.webhooks.sender import Sender


@contextlib.asynccontextmanager
async def sending(
    queue: Queue,
    workers: int = 1,
    sender: Mapping[str, Any] = MappingProxyType({}),
    mailer: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> AsyncIterator[None]:
    """Runs so many workers on the queue, with these parameters. `settings` are fields of `Settings`."""
    defaults = {"encryption_key": ENCRYPTION_KEY, "allow_private_addresses": True, "webhook_claim_idle": 10.0}
    chosen = Settings(redis_url=queue.url, **{**defaults, **settings})
    senders = [Sender(chosen, **sender).run() for _ in range(workers)]
    mailers = [Mailer(chosen, **mailer).run() for _ in range(workers) if chosen.sends_notices]
    tasks = [asyncio.create_task(each) for each in (*senders, *mailers)]
    try:
        yield
    finally:
        await cancel(*tasks)
