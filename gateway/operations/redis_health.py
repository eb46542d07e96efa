"""Checks whether Redis accepts writes, for `/ready`, the gauge `gateway_redis_up`, and a log line for each change.

Also compares the clock with Redis's. If they differ by more than `MAX_SKEW_SECONDS`, a process is not ready: to its
clock, valid tokens have expired or are not valid yet.

In a cluster, every partition of accounts is checked. While some partitions accept writes, the process stays ready: all
processes use the same Redis, so otherwise a load balancer would refuse the accounts that can be served too.
"""

from collections.abc import Callable

import structlog

from gateway.errors import BackboneUnavailable
from gateway.loops import every
from gateway.redis.client import Store
from gateway.redis.errors import advise, code_of, describe

logger = structlog.get_logger()

MAX_SKEW_SECONDS = 30.0  # between this machine's clock and Redis's; beyond that, valid tokens seem to have expired
CHECK_SECONDS = 2.0  # between two checks; with the timeout of a command, a fault is noticed within five seconds


class RedisHealth:
    def __init__(
        self,
        store: Store,
        report: Callable[[bool], object] = lambda up: None,
        report_skew: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """`report` is called after each check with whether all of Redis accepts writes, and `report_skew` with seconds.

        The seconds are those by which this machine's clock is ahead of Redis's.
        """
        self._store, self._report, self._report_skew = store, report, report_skew
        self._code = ""  # of the last logged fault
        self._clock_is_off = False

    async def keep_checking(self) -> None:
        """Checks Redis every two seconds. Runs as long as the process."""

        async def check() -> None:
            await self.check()
            await self.check_clock()

        await every(CHECK_SECONDS, check)

    async def check(self) -> str:
        """Returns a sentence about the fault that affects some accounts; '' if there is none.

        Raises BackboneUnavailable with such a sentence if Redis accepts no writes.
        """
        checked, faults = await self._store.check_writes()
        self._report(not faults)
        if not faults:
            self._log_change(None)
            return ""
        cause = faults[0].__cause__ or faults[0]
        self._log_change(cause)
        reason = describe(cause)
        if len(faults) == checked:
            raise BackboneUnavailable(f"New requests are refused: {reason}.") from cause
        return f"Requests of some accounts are refused ({len(faults)} of {checked} partitions): {reason}."

    async def check_clock(self) -> None:
        """Raises BackboneUnavailable with a sentence if the clock is off, or Redis does not answer."""
        skew = await self._store.read_skew()
        self._report_skew(skew)
        is_off = abs(skew) > MAX_SKEW_SECONDS
        if is_off and not self._clock_is_off:
            action = "synchronize the clocks of this machine and of Redis's, for example with chrony"
            logger.error("clock.off", seconds=round(skew, 1), action=action)
        elif self._clock_is_off and not is_off:
            logger.info("clock.right")
        self._clock_is_off = is_off
        if is_off:
            direction = "ahead of" if skew > 0 else "behind"
            raise BackboneUnavailable(f"The clock of this process is {abs(skew):.0f} seconds {direction} Redis's.")

    def _log_change(self, fault: BaseException | None) -> None:
        code = code_of(fault) if fault is not None else ""
        if code and code != self._code:
            logger.error("redis.unavailable", error=code, reason=describe(fault), action=advise(fault))
        elif self._code and not code:
            logger.info("redis.available")
        self._code = code
