"""The history of an app's health: of each UTC day of the last 90, how long the app did not answer, and how often.

A day has a record once the app was probed on it, so a day without probes is not taken for a good one. An outage is
added when it ends; until then, `read` adds it from the app's state. An outage over midnight counts on both days.
"""

from __future__ import annotations

import msgspec

from gateway.ids import day_of
from gateway.monitors import health
from gateway.monitors.health import AppHealth
from gateway.monitors.keys import health_days_key, health_key
from gateway.redis.client import Store
from gateway.redis.partitions import partition_tag
from gateway.redis.scripts import increment

DAYS = 90
KEPT_SECONDS = (DAYS + 1) * 86_400
DAY = 86_400_000  # ms


class HealthDay(msgspec.Struct):
    day: str
    downMs: int | None  # null: the app was not probed on this day
    outages: int


def changes(before: AppHealth, after: AppHealth, now: int) -> dict[str, int]:
    """What to add to the record after a probe at `now`, in ms: the outage that it ended. Pure."""
    ended = before.status == "unhealthy" and after.status == "healthy"
    return outage(before.since, now) if ended else {}


def outage(since: int, until: int) -> dict[str, int]:
    """The outage, day by day, of at most the last 90 days. Times in ms. Pure."""
    counts: dict[str, int] = {}
    start = max(since, until - DAYS * DAY)
    while start < until:
        end = min(until, (start // DAY + 1) * DAY)
        counts[f"{day_of(start)}:down"] = end - start
        counts[f"{day_of(start)}:outages"] = 1
        start = end
    return counts


async def add(store: Store, tag: str, app_id: str, counts: dict[str, int], now: int) -> None:
    """Adds to the record, and removes the days that are over 90 days old. An increment of 0 marks a day as probed."""
    key, oldest = health_days_key(tag, app_id), day_of(now - DAYS * DAY)
    await increment(store, key, "hash", KEPT_SECONDS, counts)
    old = [field for field in await store.client.hkeys(key) if field.partition(":")[0] < oldest]
    if old:
        await store.client.hdel(key, *old)


async def read(store: Store, account_id: str, app_id: str) -> list[HealthDay]:
    """90 days, oldest first; the last one is today."""
    tag = partition_tag(account_id)
    seconds, micros = await store.client.time()
    async with store.client.pipeline(transaction=False) as pipeline:
        pipeline.hgetall(health_days_key(tag, app_id))
        pipeline.hget(health_key(tag, app_id), "state")
        found, text = await pipeline.execute()
    state = health.read(text)
    now, counts = seconds * 1000 + micros // 1000, {name: int(value) for name, value in found.items()}
    if state.status == "unhealthy":
        for name, value in outage(state.since, now).items():
            counts[name] = counts.get(name, 0) + value
    days = [day_of(now - ago * DAY) for ago in range(DAYS - 1, -1, -1)]
    return [HealthDay(day, counts.get(f"{day}:down"), counts.get(f"{day}:outages", 0)) for day in days]
