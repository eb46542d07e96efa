"""Lists what needs an operator: unhealthy apps, expiring certificates, and deploys that failed in the last day.

The monitors list the apps that they find unhealthy, and `advance_deploy.lua` lists failed deploys. The list may contain
an app that answers again, because its monitor died in between. So each app's record decides, and corrects the list.
"""

from __future__ import annotations

import msgspec

from gateway.accounts.registry import Registry
from gateway.deploys.keys import deploy_key, ended_deploys_key, failed_deploys_key
from gateway.deploys.states import Deploy
from gateway.monitors import health
from gateway.monitors.keys import certificate_ends_key, certificate_key, unhealthy_key
from gateway.operations.directory import OwnedApp
from gateway.redis.client import Store
from gateway.redis.partitions import PARTITION_TAGS

DAY_MS = 86_400_000
EXPIRING_MS = 7 * DAY_MS
MAX_COUNTED = 500  # unhealthy apps, or certificates of a partition


async def list_unhealthy_apps(registry: Registry, limit: int) -> list[OwnedApp]:
    """Returns the apps that have been unhealthy the longest. Raises BackboneUnavailable."""
    client = registry.store.client
    async with client.pipeline(transaction=False) as pipe:
        for tag in PARTITION_TAGS:
            pipe.zrange(unhealthy_key(tag), 0, limit - 1, withscores=True)
        pages = await pipe.execute()
    tagged = zip(PARTITION_TAGS, pages, strict=True)
    listed = sorted((since, app_id, tag) for tag, page in tagged for app_id, since in page)[:limit]
    if not listed:
        return []
    found = await registry.read_apps([app_id for _, app_id, _ in listed])
    rows = [found[app_id] for _, app_id, _ in listed if app_id in found]
    states = {
        app.id: state.health
        for (app, _), state in zip(rows, await health.read_monitored_apps(registry.store, rows), strict=True)
    }
    for _, app_id, tag in listed:
        if states.get(app_id) != "unhealthy":
            await client.zrem(unhealthy_key(tag), app_id)
    return [row for row in rows if states[row[0].id] == "unhealthy"]


async def count_unhealthy_apps(registry: Registry) -> int:
    """Counts the unhealthy apps, at most `MAX_COUNTED`. Raises BackboneUnavailable."""
    return len(await list_unhealthy_apps(registry, MAX_COUNTED))


async def count_expiring_certificates(store: Store, now: int) -> int:
    """Counts certificates that end within `EXPIRING_MS`, at most `MAX_COUNTED` per partition. `now` is in ms.

    Raises BackboneUnavailable.
    """
    client, tags = store.client, PARTITION_TAGS
    async with client.pipeline(transaction=False) as pipe:
        for tag in tags:
            pipe.zrangebyscore(certificate_ends_key(tag), "-inf", now + EXPIRING_MS, 0, MAX_COUNTED)
        pages = await pipe.execute()
        listed = [(tag, app_id) for tag, page in zip(tags, pages, strict=True) for app_id in page]
        for tag, app_id in listed:
            pipe.hget(certificate_key(tag, app_id), "expiresAt")
        ends = await pipe.execute() if listed else []
    for (tag, app_id), end in zip(listed, ends, strict=True):
        if end is None:  # the app no longer has this domain
            await client.zrem(certificate_ends_key(tag), app_id)
    return sum(end is not None and int(end) <= now + EXPIRING_MS for end in ends)


async def count_failed_deploys(store: Store, now: int) -> int:
    """Counts deploys that failed in the last 24 hours, at most 100 per partition. `now` is in ms.

    Raises BackboneUnavailable.
    """
    async with store.client.pipeline(transaction=False) as pipe:
        for tag in PARTITION_TAGS:
            pipe.zcount(failed_deploys_key(tag), now - DAY_MS, "+inf")
        return sum(await pipe.execute())


async def count_ended_deploys(store: Store) -> dict[str, int]:
    """Counts all deploys that have ended, by their final state. Raises BackboneUnavailable."""
    async with store.client.pipeline(transaction=False) as pipe:
        for tag in PARTITION_TAGS:
            pipe.hgetall(ended_deploys_key(tag))
        counts: dict[str, int] = {}
        for page in await pipe.execute():
            for state, number in page.items():
                counts[state] = counts.get(state, 0) + int(number)
    return counts


async def list_failed_deploys(store: Store, limit: int) -> list[Deploy]:
    """Returns deploys that failed in the last 24 hours, newest first. Raises BackboneUnavailable."""
    seconds, _ = await store.client.time()
    oldest = seconds * 1000 - DAY_MS
    async with store.client.pipeline(transaction=False) as pipe:
        for tag in PARTITION_TAGS:
            pipe.zrevrangebyscore(failed_deploys_key(tag), "+inf", oldest, 0, limit, withscores=True)
        failed = sorted((entry for page in await pipe.execute() for entry in page), key=lambda entry: -entry[1])
        for member, _ in failed[:limit]:
            account, _, deploy_id = member.partition(" ")
            pipe.hgetall(deploy_key(account, deploy_id))
        records = await pipe.execute() if failed else []
    return [msgspec.convert(record, Deploy, strict=False) for record in records if record]
