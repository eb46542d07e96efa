"""Whether Redis takes writes: `/ready`, the gauge `gateway_redis_up`, and a log line for each change.

In a cluster every partition of accounts is checked. While some of them take writes, the process stays ready: all
processes see the same Redis, and without them a load balancer would refuse the accounts that can be served, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from gateway.errors import BackboneUnavailable
from gateway.redis.client import Store
from gateway.redis.faults import advise, code_of, describe

logger = structlog.get_logger()

INTERVAL = 2.0  # seconds; with the time limit of a command, a fault shows within five


class RedisHealth:
    def __init__(self, store: Store, report: Callable[[bool], object] = lambda up: None) -> None:
        """`report` is told after each check whether all of Redis takes writes."""
        self._store, self._report = store, report
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
        self._report(not faults)
        if not faults:
            self._note(None)
            return ""
        cause = faults[0].__cause__ or faults[0]
        self._note(cause)
        reason = describe(cause)
        if len(faults) == checked:
            raise BackboneUnavailable(f"New requests are refused: {reason}.")
        return f"Requests of some accounts are refused ({len(faults)} of {checked} partitions): {reason}."

    def _note(self, fault: BaseException | None) -> None:
        code = code_of(fault) if fault is not None else ""
        if code and code != self._code:
            logger.error("redis.unavailable", error=code, reason=describe(fault), action=advise(fault))
        elif self._code and not code:
            logger.info("redis.available")
        self._code = code
