"""Apps that have to be looked at again and again, by any number of workers, each by one at a time.

A partition has a sorted set of its apps by when they are due. A worker takes those that are (`due.lua`), asks for
their records in one go, looks, and writes down what it saw together with when the next look is due (`observe.lua`).
When it dies in between, the lease ends and another takes the app. Looks run beside each other, up to a bound; a
worker takes no more than it can begin at once, so that what it holds is being looked at.

An id without an app behind it is removed here, with all that is known of it: whoever deletes an app may be interrupted.
Redis away: everything waits, and no look is lost but the one under way.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import structlog

from gateway.accounts.records import Account, App
from gateway.accounts.registry import Registry
from gateway.cancellation import end_if_cancelled
from gateway.errors import BackboneUnavailable
from gateway.events.catalogue import Event, queued_event
from gateway.ids import new_id
from gateway.store import keys, scripts
from gateway.store.client import backbone
from gateway.store.scripts import Observation

logger = structlog.get_logger()

BATCH = 100  # apps taken at once
MARGIN = 5.0  # seconds beside a look's own budget: for Redis, before and after
PAUSE = 0.5  # seconds between looks at the sets, when nothing is due
JITTER = 0.1  # of an interval, either way: apps that became due together come apart


class Taken(NamedTuple):
    tag: str
    app: App
    known: Mapping[str, str]
    at: int  # Redis's time when it was taken, ms
    taken: float  # the same by this process's own clock, seconds

    def now(self) -> int:
        """Redis's time, ms."""
        return self.at + int((time.monotonic() - self.taken) * 1000)


class Seen(NamedTuple):
    known: dict[str, str]  # written in place of what was; empty: as before
    events: Sequence[tuple[str, Event]]
    again: float  # seconds until the next look


class Rounds:
    """`due` names the sets and `key` what is known. `wanted` tells of a live or not live app whether it is looked at;
    `look` ends within `budget` seconds."""

    def __init__(
        self,
        registry: Registry,
        due: Callable[[str], str],
        key: Callable[[str, str], str],
        wanted: Callable[[App, Account, bool], bool],
        look: Callable[[Taken], Awaitable[Seen]],
        *,
        interval: float,
        budget: float,
        under_way: int,
    ) -> None:
        self._registry, self._store = registry, registry.store
        self._due, self._key, self._wanted, self._look = due, key, wanted, look
        self._interval, self._lease, self._under_way = interval, budget + MARGIN, under_way
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        tags = keys.partition_tags()
        first = random.randrange(len(tags))  # noqa: S311 -- workers begin at different partitions
        try:
            while True:
                end_if_cancelled()
                taken = 0
                for tag in tags[first:] + tags[:first]:
                    while len(self._running) >= self._under_way:
                        await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                    try:
                        with backbone():
                            taken += await self._take(tag, min(BATCH, self._under_way - len(self._running)))
                    except BackboneUnavailable as error:  # the other partitions may be on another node
                        logger.warning("round.postponed", due=self._due(tag), error=type(error.__cause__).__name__)
                if not taken:
                    await asyncio.sleep(min(PAUSE, self._interval / 10))
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _take(self, tag: str, at_most: int) -> int:
        began = time.monotonic()
        known = self._key(tag, "").removesuffix(":")
        due = await scripts.due(self._store, tag, self._due(tag), known, limit=at_most, lease=int(self._lease * 1000))
        if not due.apps:
            return 0
        records = await self._registry.by_ids([each.id for each in due.apps])
        resting: dict[str, bool] = {}
        for each in due.apps:
            app, account = records.get(each.id, (None, None))
            if app is None or account is None or keys.tag(app.account) != tag:
                await self._forget(tag, each.id)
            elif self._wanted(app, account, each.live):
                task = asyncio.create_task(self._turn(Taken(tag, app, each.known, due.now, began)))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            else:
                resting[each.id] = bool(each.known)
        if resting:
            await self._rest(tag, due.now, resting)
        return len(due.apps)

    async def _forget(self, tag: str, app_id: str) -> None:
        client = self._store.client
        await client.zrem(self._due(tag), app_id)
        # An app that is put now is written first and enters the set last: one of us two sees the other.
        app, _ = (await self._registry.by_ids([app_id])).get(app_id, (None, None))
        if app is not None and keys.tag(app.account) == tag:
            await client.zadd(self._due(tag), {app_id: 0}, nx=True)
        else:
            await client.delete(*keys.monitored_keys(tag, app_id))

    async def _rest(self, tag: str, now: int, resting: Mapping[str, bool]) -> None:
        """Not looked at for now; what is known, if anything is, is of a time that is over."""
        again = {app_id: now + int(self._jittered(self._interval) * 1000) for app_id in resting}
        await self._store.client.zadd(self._due(tag), again, xx=True)
        for app_id, known in resting.items():
            if known:
                await self._store.client.delete(self._key(tag, app_id))

    async def _turn(self, taken: Taken) -> None:
        try:
            with backbone():
                seen = await self._look(taken)
                if time.monotonic() - taken.taken < self._lease:  # else it is another's by now
                    await self._observe(taken, seen)
        except BackboneUnavailable as error:
            logger.warning("look.lost", app=taken.app.id, error=type(error.__cause__).__name__)
        except Exception as error:
            # A fault of ours: the app is due again when the lease is over.
            logger.error("look.crashed", app=taken.app.id, exc_info=error)

    async def _observe(self, taken: Taken, seen: Seen) -> None:
        tag, app = taken.tag, taken.app
        observation = Observation(
            app=app.id,
            account=app.account,
            version=taken.known.get("version", ""),
            next_version=new_id("ver"),
            fields=seen.known,
            events=[queued_event(event, event_id, app.account, app.id, app.name) for event_id, event in seen.events],
        )
        # From look to look, however long one takes.
        again = int(max(self._jittered(seen.again) - (time.monotonic() - taken.taken), 0.0) * 1000)
        record, schedule = self._key(tag, app.id), self._due(tag)
        if await scripts.observe(self._store, record, observation, schedule=schedule, due_in=again):
            for event_id, event in seen.events:
                logger.info("monitor.told", id=event_id, type=event.type, app=app.id, account=app.account)

    @staticmethod
    def _jittered(seconds: float) -> float:
        return seconds * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311
