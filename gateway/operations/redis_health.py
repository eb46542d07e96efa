"""Whether Redis takes writes: `/ready`, the gauge `gateway_redis_up`, and a log line for each change.

In a cluster every partition of accounts is checked. While some of them take writes, the process stays ready: all
processes see the same Redis, and without them a load balancer would refuse the accounts that can be served, too.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from gateway.errors import BackboneUnavailable
from gateway.store.client import Store
from gateway.store.faults import code_of, describe
from gateway.telemetry.metrics import Metrics

logger = structlog.get_logger()

INTERVAL = 2.0  # seconds; with the time limit of a command, a fault shows within five


class RedisHealth:
    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store, self._metrics = store, metrics
        self._code = ""  # of the fault that was logged last

    async def keep_checking(self) -> None:
        """Runs as long as the process."""
        while True:
            with contextlib.suppress(BackboneUnavailable):
                await self.check()
            await asyncio.sleep(INTERVAL)

    async def check(self) -> str:
        """Says in one sentence what is wrong for some accounts; empty if nothing is.

        Raises BackboneUnavailable with such a sentence if Redis takes no writes at all.
        """
        checked, faults = await self._store.check_writes()
        self._metrics.redis_up.set(not faults)
        if not faults:
            self._note("", "")
            return ""
        cause = faults[0].__cause__ or faults[0]
        reason = describe(cause)
        self._note(code_of(cause), reason)
        if len(faults) == checked:
            raise BackboneUnavailable(f"New requests are refused: {reason}.")
        return f"Requests of some accounts are refused ({len(faults)} of {checked} partitions): {reason}."

    def _note(self, code: str, reason: str) -> None:
        if code and code != self._code:
            logger.error("redis.unavailable", error=code, reason=reason)
        elif self._code and not code:
            logger.info("redis.available")
        self._code = code
