"""Accounts and their keys as the registry creates them, and names that it never looks up."""

import asyncio
import random

import msgspec
import pytest
import redis.asyncio
from msgspec.structs import replace

from gateway.accounts.records import App, AppLimits, JwksAuth, SecretAuth
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import BackboneUnavailable, NotFound
from gateway.keys import app_key
from gateway.redis.scripts import CHANGES_CHANNEL
from tests.support.key_leaks import find_keys
from tests.support.redis_servers import RedisServer
from tests.support.registries import ACCOUNT_KEYS, KEY, an_app
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy


async def test_an_api_key_is_kept_only_as_its_hash(local: Registry, valkey: RedisServer) -> None:
    account, api_key = await local.create_account("One", "starter")
    assert api_key.startswith("csk_")
    key = await local.api_keys.identify(api_key)
    assert key is not None
    assert key.account == account.id
    with valkey.client() as client:
        assert find_keys(client, api_key[4:]) == {}
        digests = [name.decode().removeprefix("key:") for name in client.keys("key:*")]
        assert [client.ttl(f"key:{each}") for each in digests] == [-1]
    for wrong in ("", api_key[:-1], api_key + "A", api_key.upper(), *digests, "é", "*"):
        assert await local.api_keys.identify(wrong) is None


async def test_two_first_sign_ins_at_once_create_one_account(local: Registry) -> None:
    signing_in = (local.register_person("ada@example.com", 10) for _ in range(3))
    results = await asyncio.gather(*signing_in, return_exceptions=True)
    assert sorted(type(each).__name__ for each in results) == ["Account", "SignInFailed", "SignInFailed"]
    assert len(await local.members.list_accounts("ada@example.com")) == 1


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


SHOP = an_app()


async def set_limits(registry: Registry, **limits: object) -> AppLimits:
    return await registry.change_limits(SHOP, lambda before: replace(before, **limits))


async def limits(registry: Registry) -> AppLimits | None:
    app = await registry.app("shop")
    assert app is not None
    return app.limits


async def test_concurrent_changes_are_all_made(local: Registry) -> None:
    await local.put_app(SHOP, None)
    names = ("dailyEuro", "userDailyEuro", "requestsPerMinute", "userRequestsPerMinute")
    values = ("0.1", "0.2", 3, 4)
    puts = [local.put_app(replace(SHOP, customDomain=f"d{n}.example.com"), SHOP) for n in range(3)]
    await asyncio.gather(*[set_limits(local, **{n: v}) for n, v in zip(names, values, strict=True)], *puts)
    assert await limits(local) == AppLimits(*values)
    renamed = await local.put_app(replace(SHOP, name="store"), SHOP)
    assert renamed.limits == AppLimits(*values)
    await local.put_app(SHOP, renamed)
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


# -- renaming, moving and deleting, even if a step is interrupted ----------------------------------------------


async def test_the_digest_of_cached_tokens_includes_the_secret() -> None:
    """So a token that was verified before a change is not accepted after it, or at another app."""
    app, elsewhere = an_app(), an_app(auth=JwksAuth(url="https://keys.example/jwks.json"))
    changes = [{"account": "acc_2"}, {"createdAt": "2026-10-14T09:00:00.001Z"}, {"name": "store"}]
    changed = [replace(app, **change) for change in changes]  # type: ignore[arg-type]
    changed += [an_app(auth=SecretAuth(secret=secret)) for secret in ("one", "two")]
    digests = [each.auth_digest for each in (app, an_app("blog"), elsewhere, *changed)]
    assert len(set(digests)) == len(digests)
    assert replace(elsewhere, name="store").auth_digest == elsewhere.auth_digest


async def put(registry: Registry, path: str, name: str, account: str) -> App | None:
    """Puts an app as the operators' API does. Returns None if another app has the name."""
    before = await registry.find_app(path)
    taken = await registry.find_app(name)
    if taken is not None and (before is None or taken.id != before.id):
        return None
    app = an_app(name, account, id=before.id if before else path)
    await registry.put_app(app, before)
    return app


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
async def test_any_sequence_of_creating_renaming_moving_and_deleting(
    local: Registry, raw: redis.asyncio.Redis, seed: int
) -> None:
    chance = random.Random(seed)
    names, accounts = ["a", "b", "c", "d"], ["acc_one", "acc_two"]
    apps: dict[str, App] = {}  # by id

    def found(path: str) -> App | None:
        return apps.get(path) or next((app for app in apps.values() if app.name == path), None)

    for _ in range(80):
        path = chance.choice(names)
        known = found(path)
        if known and chance.random() < 0.3:
            await local.delete_app(known)
            del apps[known.id]
        else:
            name = chance.choice(names) if known else path
            written = await put(local, path, name, chance.choice(accounts))
            owner = found(name)
            assert (written is None) == (owner is not None and owner.id != (known.id if known else path))
            if written:
                apps[written.id] = written
        for each in names:
            by_name = next((app for app in apps.values() if app.name == each), None)
            assert await local.app(each) == by_name
            assert await local.find_app(each) == found(each)
        for account in accounts:
            held = sorted((a for a in apps.values() if a.account == account), key=lambda a: a.name)
            assert await local.list_apps(account) == held
    for app in [*apps.values()]:
        await local.delete_app(app)
    assert {*await raw.keys("*")} == ACCOUNT_KEYS


@pytest.mark.parametrize("step", range(3))
async def test_an_interrupted_renaming_can_be_repeated(
    local: Registry, raw: redis.asyncio.Redis, proxy: Proxy, step: int
) -> None:
    """After Redis failed between two writes, the operator repeats the put, and it completes."""
    for name in ("shop", "mart"):
        await put(local, "shop", name, "acc_one")
    async with opened(proxy.url) as store:
        proxy.lose_request, proxy.spared = CHANGES_CHANNEL.encode(), step
        with pytest.raises(BackboneUnavailable):
            await put(Registry(store, Vault(KEY)), "shop", "store", "acc_one")
    assert proxy.lose_request is None
    assert await put(local, "shop", "store", "acc_one") is not None
    renamed = an_app("store", id="shop")
    assert await local.find_app("shop") == await local.find_app("store") == renamed
    assert [await local.app(name) for name in ("shop", "mart")] == [None, None]
    assert await local.list_apps("acc_one") == [renamed]
    await local.delete_app(renamed)
    assert {*await raw.keys("*")} == ACCOUNT_KEYS
