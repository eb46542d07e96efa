"""The history of an app's health: the downtime and the number of outages on each of the last 90 UTC days.

A day is recorded once the app was probed on it, so a day without probes does not count as a day without outages. An
outage is added when it ends; until then, `read_history` adds it from the app's state. An outage over midnight is down
on both days, and counts on the first, so that a sum over days counts it once.
"""

import msgspec

from gateway.ids import day_of
from gateway.keys import health_days_key, health_key, partition_tag
from gateway.monitors import health
from gateway.monitors.health import AppHealth
from gateway.redis.client import Store
from gateway.redis.scripts import increment_counters

DAYS = 90
KEPT_SECONDS = (DAYS + 1) * 86_400
DAY_MS = 86_400_000


class HealthDay(msgspec.Struct):
    day: str
    downMs: int | None  # null: the app was not probed on this day
    outages: int


def count_ended_outage(before: AppHealth, after: AppHealth, now: int) -> dict[str, int]:
    """Returns the counts to add after a probe at `now`, in ms: those of the outage that it ended. Pure."""
    ended = before.status == "unhealthy" and after.status == "healthy"
    return split_outage(before.since, now) if ended else {}


def split_outage(since: int, until: int) -> dict[str, int]:
    """Returns the counts of an outage by day, of at most 90 days. Times in ms. Pure."""
    start = max(since, (until // DAY_MS - DAYS + 1) * DAY_MS)  # the first day that `read_history` returns
    counts = {f"{day_of(start)}:outages": 1} if start < until else {}
    while start < until:
        end = min(until, (start // DAY_MS + 1) * DAY_MS)
        counts[f"{day_of(start)}:down"] = end - start
        start = end
    return counts


async def add_counts(store: Store, tag: str, app_id: str, counts: dict[str, int], now: int) -> None:
    """Adds to the record, and removes days that are more than 90 days old. A count of 0 marks a day as probed."""
    key, oldest = health_days_key(tag, app_id), day_of(now - DAYS * DAY_MS)
    await increment_counters(store, key, "hash", KEPT_SECONDS, counts)
    old = [field for field in await store.client.hkeys(key) if field.partition(":")[0] < oldest]
    if old:
        await store.client.hdel(key, *old)


async def read_history(store: Store, account_id: str, app_id: str) -> list[HealthDay]:
    """Returns 90 days, oldest first; the last one is today."""
    tag = partition_tag(account_id)
    seconds, micros = await store.client.time()
    async with store.client.pipeline(transaction=False) as pipeline:
        pipeline.hgetall(health_days_key(tag, app_id))
        pipeline.hget(health_key(tag, app_id), "state")
        found, text = await pipeline.execute()
    state = health.decode_health(text)
    now, counts = seconds * 1000 + micros // 1000, {name: int(value) for name, value in found.items()}
    if state.status == "unhealthy":
        for name, value in split_outage(state.since, now).items():
            counts[name] = counts.get(name, 0) + value
    days = [day_of(now - ago * DAY_MS) for ago in range(DAYS - 1, -1, -1)]
    return [HealthDay(day, counts.get(f"{day}:down"), counts.get(f"{day}:outages", 0)) for day in days]
