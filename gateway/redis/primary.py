"""Detects that another server has become Redis's primary although the connections to the former one still work.

A planned switchover closes no connection: the former primary accepts writes for some seconds, and they are lost. So a
process checks the primary every second. It checks at once when a Sentinel publishes a change or an answer hints at one:
a refused write, too few replicas, a lost or silent connection. If there is a new primary, the connections move to it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel

from gateway.cancellation import cancel
from gateway.redis.errors import FAULTS

logger = structlog.get_logger()

CHECK_SECONDS = 1.0  # between two checks
NEWEST_SECONDS = 15.0  # that the newest configuration overrules older ones
MESSAGE_SECONDS = 60.0  # that one read waits for a message of a Sentinel
SHORTEST_PAUSE_SECONDS = 0.1  # between two checks, even if more are requested
# The channels of a Sentinel that announce a change of the primary.
CHANNELS = ("+switch-master", "+promoted-slave", "+config-update-from")

Address = tuple[str, int]


class Sentinels(Sentinel):
    """redis-py's Sentinel client, except that it trusts the Sentinel with the newest configuration.

    A Sentinel that was partitioned names a former primary. One that leads a switchover knows the new primary first. The
    newest configuration is remembered until all Sentinels know it: otherwise a connection that is opened meanwhile
    could lead to the former primary again, and read old data there.
    """

    _newest: tuple[float, Address] | None = None
    _newest_until = 0.0

    async def discover_master(self, service_name: str) -> Address:
        """Returns the primary's address once most Sentinels have answered. Raises MasterNotFoundError."""
        asked = [asyncio.ensure_future(self._query(sentinel, service_name)) for sentinel in self.sentinels]
        answers: list[tuple[float, Address]] = []
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    answers.append(await answer)
                except FAULTS:
                    continue
                if 2 * len(answers) > len(asked):
                    break
        finally:
            await cancel(*asked)
        if not answers:
            raise MasterNotFoundError("no Sentinel names a primary that it can reach")
        newest, now = max(answers), asyncio.get_running_loop().time()
        if self._newest is None or newest >= self._newest or now > self._newest_until:
            self._newest, self._newest_until = newest, now + NEWEST_SECONDS
        return self._newest[1]

    async def _query(self, sentinel: Any, service: str) -> tuple[float, Address]:
        """Returns the epoch of the Sentinel's configuration, and the primary."""
        async with sentinel.pipeline(transaction=False) as pipe:
            pipe.execute_command("SENTINEL MASTER", service, once=True)
            pipe.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", service, once=True)
            state, address = await pipe.execute()
        promoted = address != (state["ip"], state["port"])
        if not promoted and (state["is_sdown"] or state["is_odown"] or not state["is_master"]):
            raise MasterNotFoundError("the primary is down")
        return state["config-epoch"] + promoted / 2, address


class PrimaryWatch:
    """Runs `check` every second, and soon after each request for it. The first request starts it."""

    def __init__(self, check: Callable[[], Awaitable[None]], sentinels: Sequence[Any] = ()) -> None:
        """`sentinels` are redis-py's clients of the Sentinels. Their messages request a check, too."""
        self._check, self._sentinels = check, sentinels
        self._check_requested = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    def request_check(self) -> None:
        if not self._tasks and not self._closed:
            work = [self._check_repeatedly(), *map(self._follow_sentinel, self._sentinels)]
            self._tasks = [asyncio.create_task(each) for each in work]
        self._check_requested.set()

    async def close(self) -> None:
        self._closed = True
        await cancel(*self._tasks)

    async def _check_repeatedly(self) -> None:
        while not self._closed:
            try:
                await self._check()
            except Exception as error:  # without the watch, connections would stay at a former primary
                logger.error("redis.check_crashed", exc_info=error)
            await asyncio.sleep(SHORTEST_PAUSE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS - SHORTEST_PAUSE_SECONDS):
                    await self._check_requested.wait()
            self._check_requested.clear()

    async def _follow_sentinel(self, sentinel: Any) -> None:
        while not self._closed:
            try:
                async with sentinel.pubsub() as subscription:
                    await subscription.subscribe(*CHANNELS)
                    while True:
                        if await subscription.get_message(ignore_subscribe_messages=True, timeout=MESSAGE_SECONDS):
                            self._check_requested.set()
            except Exception as error:
                if not isinstance(error, FAULTS):
                    logger.error("redis.sentinel_not_followed", exc_info=error)
                await asyncio.sleep(CHECK_SECONDS)
