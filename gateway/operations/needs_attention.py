"""Lists what needs an operator: unhealthy apps, expiring certificates, and deploys that failed in the last day.

The monitors list the apps that they find unhealthy, and `advance_deploy.lua` lists failed deploys. The list may contain
an app that answers again, because its monitor died in between. So each app's record decides, and corrects the list.

Every function raises BackboneUnavailable.
"""

from collections import Counter

import msgspec

from gateway.accounts.registry import Registry
from gateway.deploys.records import Deploy
from gateway.keys import (
    PARTITION_TAGS,
    certificate_ends_key,
    certificate_key,
    deploy_key,
    ended_deploys_key,
    failed_deploys_key,
    unhealthy_key,
)
from gateway.monitors import health
from gateway.operations.directory import OwnedApp
from gateway.redis.client import Store

DAY_MS = 86_400_000
EXPIRING_MS = 7 * DAY_MS
MAX_COUNTED = 500  # unhealthy apps, or certificates of a partition


async def list_unhealthy_apps(registry: Registry, limit: int) -> list[OwnedApp]:
    """Returns the apps that have been unhealthy the longest."""
    store = registry.store
    pages = await store.read_each(
        PARTITION_TAGS, lambda pipe, tag: pipe.zrange(unhealthy_key(tag), 0, limit - 1, withscores=True)
    )
    tagged = zip(PARTITION_TAGS, pages, strict=True)
    listed = sorted((since, app_id, tag) for tag, page in tagged for app_id, since in page)[:limit]
    if not listed:
        return []
    found = await registry.read_apps([app_id for _, app_id, _ in listed])
    rows = [found[app_id] for _, app_id, _ in listed if app_id in found]
    states = {
        app.id: state.health
        for (app, _), state in zip(rows, await health.read_monitored_apps(store, rows), strict=True)
    }
    for _, app_id, tag in listed:
        if states.get(app_id) != "unhealthy":
            await store.client.zrem(unhealthy_key(tag), app_id)
    return [row for row in rows if states[row[0].id] == "unhealthy"]


async def count_unhealthy_apps(registry: Registry) -> int:
    """Counts the unhealthy apps, at most `MAX_COUNTED`."""
    return len(await list_unhealthy_apps(registry, MAX_COUNTED))


async def count_expiring_certificates(store: Store, now: int) -> int:
    """Counts certificates that end within `EXPIRING_MS`, at most `MAX_COUNTED` per partition. `now` is in ms."""
    until = now + EXPIRING_MS
    pages = await store.read_each(
        PARTITION_TAGS,
        lambda pipe, tag: pipe.zrangebyscore(certificate_ends_key(tag), "-inf", until, 0, MAX_COUNTED),
    )
    listed = [(tag, app_id) for tag, page in zip(PARTITION_TAGS, pages, strict=True) for app_id in page]
    ends = await store.read_each(listed, lambda pipe, each: pipe.hget(certificate_key(*each), "expiresAt"))
    for (tag, app_id), end in zip(listed, ends, strict=True):
        if end is None:  # the app no longer has this domain
            await store.client.zrem(certificate_ends_key(tag), app_id)
    return sum(end is not None and int(end) <= until for end in ends)


async def count_failed_deploys(store: Store, now: int) -> int:
    """Counts deploys that failed in the last 24 hours, at most 100 per partition. `now` is in ms."""
    return sum(
        await store.read_each(
            PARTITION_TAGS, lambda pipe, tag: pipe.zcount(failed_deploys_key(tag), now - DAY_MS, "+inf")
        )
    )


async def count_ended_deploys(store: Store) -> dict[str, int]:
    """Counts all deploys that have ended, by their final state."""
    counts: Counter[str] = Counter()
    for page in await store.read_each(PARTITION_TAGS, lambda pipe, tag: pipe.hgetall(ended_deploys_key(tag))):
        counts.update({state: int(number) for state, number in page.items()})
    return counts


async def list_failed_deploys(store: Store, limit: int) -> list[Deploy]:
    """Returns deploys that failed in the last 24 hours, newest first."""
    seconds, _ = await store.client.time()
    oldest = seconds * 1000 - DAY_MS
    pages = await store.read_each(
        PARTITION_TAGS,
        lambda pipe, tag: pipe.zrevrangebyscore(failed_deploys_key(tag), "+inf", oldest, 0, limit, withscores=True),
    )
    failed = sorted((entry for page in pages for entry in page), key=lambda entry: -entry[1])[:limit]
    names = [deploy_key(*member.split(" ")) for member, _ in failed]
    records = await store.read_each(names, lambda pipe, name: pipe.hgetall(name))
    return [msgspec.convert(record, Deploy, strict=False) for record in records if record]
