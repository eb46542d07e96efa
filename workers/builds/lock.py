"""The builders' lock: a record in Redis that names the data folder of the apps.

The apps are served from one data folder. A builder with another folder, such as an empty folder on a new machine, would
report apps as live that nobody can reach. Therefore it waits. The record outlives its builders: neither a restart, a
kill nor a stalled Redis may hand the apps over to a folder that does not have them. Another folder takes over when an
operator deletes the record, or after a week without a builder.

Builders with the same folder share the record. The folder's lock file selects one of them.
"""

import asyncio

import structlog

from gateway.keys import BUILDER_KEY
from gateway.redis.client import Store, until_redis_answers

logger = structlog.get_logger()

LIFETIME_SECONDS = 7 * 86_400  # of the record, after the last builder with this folder
EXTEND_SECONDS = 5.0  # between extensions of the record
RETRY_SECONDS = 1.0  # between attempts to acquire the lock


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
                    action="the apps are in another data folder, so this builder stands by; if that folder no longer "
                    f"exists, delete the key {BUILDER_KEY} in Redis",
                )
            waiting = True
            await asyncio.sleep(RETRY_SECONDS)

    async def keep_extending(self) -> None:
        """Extends the record until canceled. Raises RuntimeError if the record names another folder."""
        while True:
            if not await until_redis_answers(self._extend):
                raise RuntimeError("another worker builds in a different data folder")
            await asyncio.sleep(EXTEND_SECONDS)

    async def _extend(self) -> bool:
        """Writes or extend the record. Returns False if it names another folder."""
        owner = await self._store.client.set(BUILDER_KEY, self._folder_id, nx=True, get=True, ex=LIFETIME_SECONDS)
        if owner == self._folder_id:
            await self._store.client.expire(BUILDER_KEY, LIFETIME_SECONDS)
        return owner in (None, self._folder_id)
