"""The lock in Redis that lets builders work in one data folder only.

The apps are served from one data folder. A builder with another one would report apps as live that nobody can reach,
so it waits. Builders with the same folder share the lock; among them the lock file of the folder decides.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from gateway.errors import BackboneUnavailable
from gateway.store import keys, scripts
from gateway.store.client import Store, backbone, until_redis_answers

logger = structlog.get_logger()

LIFETIME = 15  # seconds
RETRY_INTERVAL = 1.0  # seconds


class BuilderLock:
    def __init__(self, store: Store, folder_id: str) -> None:
        self._store, self._folder_id = store, folder_id

    async def acquire(self) -> None:
        """Waits while builders with another data folder hold the lock."""
        waiting = False
        while not await until_redis_answers(self._extend):
            if not waiting:
                logger.warning(
                    "deploys.elsewhere", action="another worker builds in a different data folder; this one stands by"
                )
            waiting = True
            await asyncio.sleep(RETRY_INTERVAL)

    async def keep(self) -> None:
        """Extends the lock until it is cancelled. Raises RuntimeError when a builder with another folder has it."""
        while True:
            if not await until_redis_answers(self._extend):
                raise RuntimeError("another worker builds in a different data folder")
            await asyncio.sleep(LIFETIME / 3)

    async def release(self) -> None:
        with contextlib.suppress(BackboneUnavailable):
            await scripts.change(self._store, keys.BUILDER, "", expected=self._folder_id)

    async def _extend(self) -> bool:
        """Takes or extends the lock; returns False when it is held for another folder."""
        with backbone():
            owner = await self._store.client.set(keys.BUILDER, self._folder_id, nx=True, get=True, ex=LIFETIME)
            if owner == self._folder_id:
                await self._store.client.expire(keys.BUILDER, LIFETIME)
        return owner in (None, self._folder_id)
