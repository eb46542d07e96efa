"""An account's apps are created and deleted one at a time, and a failed creation leaves nothing."""

import pytest
import redis.asyncio

from gateway.accounts.app_changes import AppChanges
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import AppLimitReached, BackboneUnavailable
from gateway.keys import app_changes_key, app_window_key, deleted_apps_key, partition_tag, spend_key
from gateway.redis.scripts import CHANGES_CHANNEL, compare_and_set
from tests.support.registries import ACCOUNT_KEYS, KEY, an_app
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy


@pytest.mark.parametrize("step", range(4))
async def test_a_creation_that_fails_leaves_nothing(
    local: Registry, raw: redis.asyncio.Redis, proxy: Proxy, step: int
) -> None:
    """After Redis failed before one of the writes, the name is free and the app does not count."""
    async with opened(proxy.url) as store:
        await compare_and_set(store, "loads", "")
        proxy.lose_request, proxy.spared = CHANGES_CHANNEL.encode(), step
        with pytest.raises(BackboneUnavailable):
            await AppChanges(Registry(store, Vault(KEY))).create_app(an_app(id="app-1"), limit=1)
    assert proxy.lose_request is None
    changes, second = AppChanges(local), an_app(id="app-2")
    assert set(await raw.keys("*")) <= {app_changes_key("acc_one")} | ACCOUNT_KEYS
    await changes.create_app(second, limit=1)
    assert await local.find_app("app-2") == await local.find_app("shop") == second
    with pytest.raises(AppLimitReached):
        await changes.create_app(an_app("other"), limit=1)
    await changes.delete_app(second)
    assert {*await raw.keys("*:account:*")} == ACCOUNT_KEYS
    assert await raw.keys("alias:*") == await raw.keys("app:*") == []


async def test_a_new_app_inherits_the_rate_window_of_a_deleted_one(local: Registry, raw: redis.asyncio.Redis) -> None:
    """So an account cannot exceed an app's rate by creating and deleting apps."""
    changes, tag = AppChanges(local), partition_tag("acc_one")

    async def window(app: App) -> list[str]:
        found: list[str] = await raw.lrange(app_window_key(tag, app.id), 0, -1)  # type: ignore[misc]
        return found

    one, two, three, four = (an_app(f"shop-{number}") for number in range(1, 5))
    for app in (one, two):
        await changes.create_app(app, limit=2)
    await raw.rpush(app_window_key(tag, two.id), "1", "2", "3")  # type: ignore[misc]
    await raw.expire(app_window_key(tag, two.id), 60)
    spend = spend_key("acc_one", await local.store.today())
    await raw.hset(spend, mapping={"settled": "9", f"settled:{two.id}": "9", f"reserved:{two.id}": "0"})  # type: ignore[misc]
    await raw.expire(spend, 60)
    for app in (one, two):
        await changes.delete_app(app)
    assert await raw.hgetall(spend) == {"settled": "9", "settled:deleted": "9"}  # type: ignore[misc]
    await changes.create_app(three, limit=2)
    await changes.create_app(four, limit=2)
    assert [await window(app) for app in (two, three, four)] == [[], ["1", "2", "3"], []]
    assert 0 < await raw.ttl(app_window_key(tag, three.id)) <= 60
    assert not await raw.exists(deleted_apps_key("acc_one"))
