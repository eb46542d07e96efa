"""Accounts and their keys as the registry creates them, and names that it never looks up."""

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from gateway.accounts.records import App, AppLimits
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import NotFound
from gateway.keys import app_key
from tests.support.key_leaks import find_keys
from tests.support.redis_servers import RedisServer
from tests.support.registries import KEY, an_app
from tests.support.stores import opened


async def test_an_api_key_is_kept_only_as_its_hash(local: Registry, valkey: RedisServer) -> None:
    account, api_key = await local.create_account("One", "starter")
    assert api_key.startswith("csk_")
    key = await local.api_keys.identify(api_key)
    assert key is not None
    assert key.account == account.id
    with valkey.client() as client:
        assert find_keys(client, api_key[4:]) == {}
        digests = [name.decode().removeprefix("key:") for name in client.keys("key:*")]
    for wrong in ("", api_key[:-1], api_key + "A", api_key.upper(), *digests, "é", "*"):
        assert await local.api_keys.identify(wrong) is None


@pytest.mark.parametrize("name", ["", "..", "shop:x", "a" * 64, "*", "shop\n"])
async def test_an_invalid_name_is_never_looked_up(redis_url: str, name: str) -> None:
    async with opened("redis://127.0.0.1:1/0") as store:
        assert await Registry(store, Vault(KEY)).find_app(name) is None


async def test_a_damaged_record_affects_no_other_app(local: Registry) -> None:
    account, _ = await local.create_account("One", "starter")
    names = [f"shop-{number}" for number in range(7)]
    for name in names:
        record = msgspec.json.encode(an_app(name, account.id, id=name))
        await local.store.client.set(app_key(name), b"{" if name == "shop-2" else record)
    found, damaged = await local.read_intact_apps(["none", *names])
    assert (sorted(found), list(damaged)) == ([name for name in names if name != "shop-2"], ["shop-2"])
    assert await local.read_intact_apps([]) == ({}, {})


# -- limits of an app ------------------------------------------------------------------------------------------


SHOP = App(id="shop", name="shop", account="acc_one", createdAt="")


async def set_limits(registry: Registry, app: App = SHOP, **limits: object) -> AppLimits:
    return await registry.change_limits(app, lambda before: replace(before, **limits))


async def limits(registry: Registry, name: str = "shop") -> AppLimits | None:
    app = await registry.app(name)
    assert app is not None
    return app.limits


async def test_a_put_keeps_limits_that_were_changed_meanwhile(local: Registry) -> None:
    await local.put_app(SHOP, None)
    before = await local.find_app("shop")
    await set_limits(local, dailyEuro="0.01")
    await local.put_app(replace(SHOP, customDomain="shop.example.com"), before)
    assert await limits(local) == AppLimits(dailyEuro="0.01")
    before = await local.find_app("shop")
    await set_limits(local, requestsPerMinute=3)
    await local.put_app(replace(SHOP, name="store"), before)
    assert await limits(local, "store") == AppLimits(dailyEuro="0.01", requestsPerMinute=3)
    await local.delete_app(replace(SHOP, name="store"))


async def test_concurrent_changes_are_all_made(local: Registry) -> None:
    await local.put_app(SHOP, None)
    names = ("dailyEuro", "userDailyEuro", "requestsPerMinute", "userRequestsPerMinute")
    values = ("0.1", "0.2", 3, 4)
    puts = [local.put_app(replace(SHOP, customDomain=f"d{n}.example.com"), SHOP) for n in range(3)]
    await asyncio.gather(*[set_limits(local, **{n: v}) for n, v in zip(names, values, strict=True)], *puts)
    assert await limits(local) == AppLimits(*values)
    await asyncio.gather(*[set_limits(local, requestsPerMinute=n) for n in range(20)])
    await set_limits(local, **dict.fromkeys(names))
    assert await limits(local) is None
    await local.delete_app(SHOP)


async def test_the_limits_of_a_deleted_or_moved_app_cannot_be_changed(local: Registry) -> None:
    with pytest.raises(NotFound):
        await set_limits(local, dailyEuro="0")
    await local.put_app(SHOP, None)
    await set_limits(local, dailyEuro="0")
    await local.put_app(replace(SHOP, account="acc_two"), SHOP)
    with pytest.raises(NotFound):
        await set_limits(local, dailyEuro="0.01")
    assert await limits(local) is None
    await local.delete_app(replace(SHOP, account="acc_two"))
