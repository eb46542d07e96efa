"""An account holder's limits survive concurrent writes of the app's record."""

import asyncio

import pytest
from msgspec.structs import replace

from gateway.accounts.records import App, AppLimits
from gateway.accounts.registry import Registry
from gateway.errors import NotFound

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
