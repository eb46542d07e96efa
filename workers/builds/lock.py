"""The record in Redis of the data folder that builders work in.

The apps are served from one data folder. A builder with another one, such as an empty folder on a new machine, would
report apps as live that nobody can reach, so it waits. The record outlives its builders: neither a restart, nor a kill,
nor a Redis that stands still may hand the apps over to a folder that does not have them. Another folder takes over when
an operator deletes the record, or after a week without a builder.

Builders with the same folder share the record; among them the lock file of the folder decides.
"""

from __future__ import annotations

import asyncio

import structlog

from gateway.deploys.keys import BUILDER_KEY
from gateway.redis.client import Store, until_redis_answers

logger = structlog.get_logger()

LIFETIME = 7 * 86_400  # seconds after the last builder with this folder
EXTEND_INTERVAL = 5.0  # seconds
RETRY_INTERVAL = 1.0  # seconds


class BuilderLock:
    def __init__(self, store: Store, folder_id: str) -> None:
        self._store, self._folder_id = store, folder_id

    async def acquire(self) -> None:
        """Waits while the record names another data folder."""
        waiting = False
        while not await until_redis_answers(self._extend):
            if not waiting:
                logger.warning(
                    "deploys.elsewhere",
                    action="the apps are in another data folder, so this builder stands by; if that folder is gone for "
                    f"good, delete the key {BUILDER_KEY} in Redis",
                )
            waiting = True
            await asyncio.sleep(RETRY_INTERVAL)

    async def keep(self) -> None:
        """Extends the record until it is canceled. Raises RuntimeError when it names another folder."""
        while True:
            if not await until_redis_answers(self._extend):
                raise RuntimeError("another worker builds in a different data folder")
            await asyncio.sleep(EXTEND_INTERVAL)

    async def _extend(self) -> bool:
        """Writes or extends the record; returns False when it names another folder."""
        owner = await self._store.client.set(BUILDER_KEY, self._folder_id, nx=True, get=True, ex=LIFETIME)
        if owner == self._folder_id:
            await self._store.client.expire(BUILDER_KEY, LIFETIME)
        return owner in (None, self._folder_id)
