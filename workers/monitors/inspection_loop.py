"""Inspects apps at an interval. Any number of workers share the apps, and one worker at a time inspects each app.

Each partition has a sorted set of its apps, scored by when they are due. A worker takes the apps that are due
(`take_due_apps.lua`), reads their records in one request, inspects them, and writes each observation together with the
time of the next inspection (`record_observation.lua`). If a worker dies meanwhile, its time ends and another
worker takes the app. Inspections run concurrently up to a bound. A worker takes only as many apps as it can
inspect at once.

The deletion of an app may be interrupted. Therefore this loop removes ids without an app, with all data stored for
them. While Redis is unavailable, everything waits, and only the inspections under way are lost.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import structlog

from gateway.accounts.records import Account, App
from gateway.accounts.registry import Registry
from gateway.cancellation import RunningTasks, end_if_canceled
from gateway.errors import BackboneUnavailable
from gateway.events.catalog import Event, prepare_event
from gateway.ids import new_id
from gateway.keys import PARTITION_TAGS, monitored_keys, partition_tag
from gateway.monitors import scripts
from gateway.redis.errors import code_of

logger = structlog.get_logger()

BATCH_APPS = 100  # that are taken at once
HOLD_MARGIN_SECONDS = 5.0  # added to an inspection's budget, for the requests to Redis before and after it
IDLE_SECONDS = 0.5  # before the next look, if nothing was due
JITTER = 0.1  # share of an interval, in both directions, so that apps that became due together spread out


class InspectedApp(NamedTuple):
    tag: str
    app: App
    known: Mapping[str, str]  # data stored by earlier observations
    at: int  # when it was taken, by the clock of Redis, ms
    held_until: int  # by the same clock, ms
    began: float  # the same by the clock of this process, seconds

    def now(self) -> int:
        """Returns the current time by the clock of Redis, in ms."""
        return self.at + int((time.monotonic() - self.began) * 1000)


class Inspection(NamedTuple):
    known: dict[str, str]  # replaces the stored data, unless it is empty
    events: Sequence[tuple[str, Event]]  # with their ids
    again: float  # seconds until the next inspection
    then: Callable[[], Awaitable[None]] | None = None  # called by the worker that has recorded this observation


class InspectionLoop:
    """Inspects apps until canceled.

    `due` returns the key of a partition's sorted set, and `key` the key of an app's record. `applies` decides by app,
    account and whether the app is live. `inspect` must end within `budget` seconds. While an app is not inspected, of
    its stored data only what `keep` returns stays.
    """

    def __init__(
        self,
        registry: Registry,
        due: Callable[[str], str],
        key: Callable[[str, str], str],
        applies: Callable[[App, Account, bool], bool],
        inspect: Callable[[InspectedApp], Awaitable[Inspection]],
        *,
        interval: float,
        budget: float,
        at_a_time: int,
        keep: Callable[[Mapping[str, str]], dict[str, str]] = lambda _: {},
    ) -> None:
        self._registry, self._store = registry, registry.store
        self._due, self._key, self._applies, self._inspect, self._keep = due, key, applies, inspect, keep
        self._interval, self._held_for, self._at_a_time = interval, budget + HOLD_MARGIN_SECONDS, at_a_time
        self._running = RunningTasks()

    async def run(self) -> None:
        tags, postponed = PARTITION_TAGS, False
        first = random.randrange(len(tags))  # noqa: S311 -- workers start at different partitions
        try:
            while True:
                end_if_canceled()
                number, failing, postponed = 0, postponed, False
                for tag in tags[first:] + tags[:first]:
                    while len(self._running) >= self._at_a_time:
                        await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
                    try:
                        number += await self._take_due(tag, min(BATCH_APPS, self._at_a_time - len(self._running)))
                    except BackboneUnavailable as error:  # the other partitions may be on another node
                        if not failing:  # one line per outage
                            logger.warning("inspection.postponed", due=self._due(tag), error=code_of(error.__cause__))
                        failing = postponed = True
                if not number:
                    await asyncio.sleep(min(IDLE_SECONDS, self._interval / 10))
        finally:
            await self._running.cancel()

    async def _take_due(self, tag: str, at_most: int) -> int:
        began = time.monotonic()
        known = self._key(tag, "").removesuffix(":")
        due = await scripts.take_due_apps(
            self._store, tag, self._due(tag), known, limit=at_most, held_for=int(self._held_for * 1000)
        )
        if not due.apps:
            return 0
        records, damaged = await self._registry.read_intact_apps([each.id for each in due.apps])
        skipped: list[InspectedApp] = []
        for each in due.apps:
            if each.id in damaged:  # due again later
                logger.error("inspection.unreadable", app=each.id, error=damaged[each.id])
                continue
            app, account = records.get(each.id, (None, None))
            if app is None or account is None or partition_tag(app.account) != tag:
                await self._forget(tag, each.id)
                continue
            target = InspectedApp(tag, app, each.known, due.now, due.held_until, began)
            if self._applies(app, account, each.live):
                self._running.start(self._inspect_and_observe(target))
            else:
                skipped.append(target)
        if skipped:
            await self._skip(tag, due, skipped)
        return len(due.apps)

    async def _forget(self, tag: str, app_id: str) -> None:
        client = self._store.client
        await client.zrem(self._due(tag), app_id)
        # Saving an app writes its record first and adds it to the set last. So either this code reads the record, or
        # the app is added to the set after this removal.
        app, _ = (await self._registry.read_apps([app_id])).get(app_id, (None, None))
        if app is not None and partition_tag(app.account) == tag:
            await client.zadd(self._due(tag), {app_id: 0}, nx=True)
        else:
            await client.delete(*monitored_keys(tag, app_id))

    async def _skip(self, tag: str, due: scripts.DueApps, skipped: Sequence[InspectedApp]) -> None:
        """Postpones apps that are not inspected for now, and reduces their stored data to what is kept."""
        await self._postpone(tag, [target.app.id for target in skipped], due.now, due.held_until)
        for target in skipped:
            try:
                kept = self._keep(target.known)
            except msgspec.MsgspecError as error:
                logger.error("inspection.unreadable", app=target.app.id, error=str(error))
                kept = {}
            if not kept.items() <= target.known.items():
                await self._observe(target, Inspection(kept, [], self._interval))
            elif target.known and not kept:
                await self._store.client.delete(self._key(tag, target.app.id))

    async def _postpone(self, tag: str, app_ids: Iterable[str], now: int, held_until: int) -> None:
        """Makes taken apps due again after the interval. `now` is when they were taken."""
        again = {app_id: now + int(self._jittered(self._interval) * 1000) for app_id in app_ids}
        await scripts.postpone_apps(self._store, self._due(tag), again, held_until=held_until)

    async def _inspect_and_observe(self, target: InspectedApp) -> None:
        try:
            observation = await self._inspect(target)
            if time.monotonic() - target.began < self._held_for:  # later, another worker may have taken it
                await self._observe(target, observation)
        except BackboneUnavailable as error:
            logger.warning("inspection.lost", app=target.app.id, error=code_of(error.__cause__))
        except Exception as error:
            # A bug: the app is due again after the interval.
            logger.error("inspection.crashed", app=target.app.id, exc_info=error)
            with contextlib.suppress(BackboneUnavailable):  # then it is due again sooner
                await self._postpone(target.tag, [target.app.id], target.at, target.held_until)

    async def _observe(self, target: InspectedApp, observation: Inspection) -> None:
        app = target.app
        # The interval runs from the start of one inspection to the start of the next.
        again = int(max(self._jittered(observation.again) - (time.monotonic() - target.began), 0.0) * 1000)
        events = [
            prepare_event(event, event_id, app.account, app.id, app.name) for event_id, event in observation.events
        ]
        if await scripts.record_observation(
            self._store,
            self._key(target.tag, app.id),
            app=app.id,
            account=app.account,
            version=target.known.get("version", ""),
            next_version=new_id("ver"),
            fields=observation.known,
            events=events,
            schedule=self._due(target.tag),
            held_until=target.held_until,
            due_in=again,
        ):
            for event_id, event in observation.events:
                logger.info("monitor.event_queued", id=event_id, type=event.type, app=app.id, account=app.account)
            if observation.then is not None:
                await observation.then()

    @staticmethod
    def _jittered(seconds: float) -> float:
        return seconds * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311
