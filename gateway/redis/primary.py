"""Notices that Redis's primary is another server now, although the connections to its predecessor live.

A switchover that is planned ends no connection: the former primary takes writes for seconds, and they are lost. So the
Sentinels' messages are followed, and whoever leads to the primary is asked again each second, and at once whenever an
answer makes the primary doubtful: a refused write, too few replicas, a lost or a silent connection. Then connections
move.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio.sentinel import MasterNotFoundError, Sentinel

from gateway.redis.errors import FAULTS

INTERVAL = 1.0  # seconds between two looks
LISTENING = 60.0  # seconds for one message of a Sentinel
PAUSE = 0.1  # seconds, at least, between a look and the next, whatever is in doubt
# What a Sentinel publishes when the primary changes, or is about to.
CHANNELS = ("+switch-master", "+promoted-slave", "+config-update-from")

Address = tuple[str, int]


class Sentinels(Sentinel):
    """redis-py's, but it believes the Sentinel whose configuration is the newest.

    One that was cut off names a former primary. One that leads a switchover names the new primary before it has told
    the others.
    """

    async def discover_master(self, service_name: str) -> Address:
        """Once most Sentinels have answered. Raises MasterNotFoundError."""
        asked = [asyncio.ensure_future(self._ask(sentinel, service_name)) for sentinel in self.sentinels]
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
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not answers:
            raise MasterNotFoundError("no Sentinel names a primary that it reaches")
        return max(answers)[1]

    async def _ask(self, sentinel: Any, service: str) -> tuple[float, Address]:
        """How new its configuration is, and the primary."""
        async with sentinel.pipeline(transaction=False) as pipe:
            pipe.execute_command("SENTINEL MASTER", service, once=True)
            pipe.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", service, once=True)
            state, address = await pipe.execute()
        promoted = address != (state["ip"], state["port"])
        if not promoted and (state["is_sdown"] or state["is_odown"] or not state["is_master"]):
            raise MasterNotFoundError("the primary is down")
        return state["config-epoch"] + promoted / 2, address


class PrimaryWatch:
    """Calls `look` each second, and soon after each doubt. The first doubt begins it."""

    def __init__(self, check: Callable[[], Awaitable[None]], sentinels: Sequence[Any] = ()) -> None:
        """`sentinels`: redis-py's clients of them, whose messages are doubts too."""
        self._check, self._sentinels = check, sentinels
        self._doubtful = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    def doubt(self) -> None:
        if not self._tasks and not self._closed:
            work = [self._watch(), *map(self._follow, self._sentinels)]
            self._tasks = [asyncio.create_task(each) for each in work]
        self._doubtful.set()

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await self._check()
            await asyncio.sleep(PAUSE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL - PAUSE):
                    await self._doubtful.wait()
            self._doubtful.clear()

    async def _follow(self, sentinel: Any) -> None:
        while True:
            try:
                async with sentinel.pubsub() as subscription:
                    await subscription.subscribe(*CHANNELS)
                    while True:
                        if await subscription.get_message(ignore_subscribe_messages=True, timeout=LISTENING):
                            self._doubtful.set()
            except FAULTS:
                await asyncio.sleep(INTERVAL)
