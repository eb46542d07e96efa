"""Enrolls apps with the monitors, and in the partitions' lists of apps."""

from gateway.accounts.records import App
from gateway.accounts.suspended import list_suspended, unlist_suspended
from gateway.keys import (
    apps_key,
    certificate_ends_key,
    certificates_key,
    domain_checks_key,
    monitored_keys,
    partition_tag,
    probes_key,
    unhealthy_key,
)
from gateway.redis.client import Store


async def enroll_app(store: Store, app: App) -> None:
    """Comes after the app's record is written: a monitor that finds no app for an id removes the id."""
    tag = partition_tag(app.account)
    await store.client.zadd(apps_key(tag), {app.id: 0})
    await store.client.zadd(probes_key(tag), {app.id: 0}, nx=True)
    await store.client.zadd(domain_checks_key(tag), {app.id: 0}, nx=True)
    # The domain may be a new one: its certificate is due now.
    await store.client.zadd(certificates_key(tag), {app.id: 0})
    if app.suspension is not None:  # it may come from another account
        await list_suspended(store, app.account, app.id)


async def withdraw_app(store: Store, app: App) -> None:
    """Removes the app from the lists, and the monitors' records of it."""
    tag = partition_tag(app.account)
    listed = [apps_key(tag), probes_key(tag), certificates_key(tag), domain_checks_key(tag)]
    listed += [unhealthy_key(tag), certificate_ends_key(tag)]
    for zset in listed:
        await store.client.zrem(zset, app.id)
    await store.client.delete(*monitored_keys(tag, app.id))
    if app.suspension is not None:
        await unlist_suspended(store, app.account, app.id)
