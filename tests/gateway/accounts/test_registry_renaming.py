"""Apps are renamed, moved and deleted, even if a step is interrupted."""

import asyncio
import random

import pytest
import redis.asyncio
from msgspec.structs import replace

from gateway.accounts.records import App, JwksAuth, SecretAuth
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import BackboneUnavailable
from gateway.keys import app_key
from gateway.redis.scripts import CHANGES_CHANNEL
from tests.support.polling import wait_until
from tests.support.registries import ACCOUNT_KEYS, KEY, an_app, wait_for_change
from tests.support.selection import with_more_in_test_all
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy


async def test_a_renamed_app_is_found_by_its_id_and_its_new_name(local: Registry, peer: Registry) -> None:
    first = an_app()
    await local.put_app(first, None)
    assert await peer.app("shop") == first
    second = replace(first, name="store")
    await local.put_app(second, first)
    await wait_for_change(peer, second)
    for registry in (local, peer):
        assert await registry.find_app("shop") == await registry.find_app("store") == second
        assert await registry.list_apps("acc_one") == [second]
    await wait_until(lambda: app_key("shop") not in peer.cache._copies, timeout=1)
    assert await peer.app("shop") is None
    third = replace(first, name="shop")
    await local.put_app(third, second)
    assert await local.find_app("shop") == third
    assert await local.find_app("store") is None


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


@pytest.mark.parametrize("former", ["shop", "mart"])
@pytest.mark.parametrize("step", range(3))
async def test_an_interrupted_renaming_can_be_repeated(
    local: Registry, raw: redis.asyncio.Redis, proxy: Proxy, step: int, former: str
) -> None:
    """After Redis failed between two writes, the operator repeats the put, and it completes."""
    for name in dict.fromkeys(("shop", former)):
        await put(local, "shop", name, "acc_one")
    async with opened(proxy.url) as store:
        proxy.lose_request, proxy.spared = CHANGES_CHANNEL.encode(), step
        with pytest.raises(BackboneUnavailable):
            await put(Registry(store, Vault(KEY)), "shop", "store", "acc_one")
    assert proxy.lose_request is None
    assert await put(local, "shop", "store", "acc_one") is not None
    renamed = an_app("store", id="shop")
    assert await local.find_app("shop") == await local.find_app("store") == renamed
    for name in ("shop", "mart"):
        assert await local.app(name) is None
    assert await local.list_apps("acc_one") == [renamed]
    await local.delete_app(renamed)
    assert {*await raw.keys("*")} == ACCOUNT_KEYS


@with_more_in_test_all("rounds", 3, 10)
async def test_two_concurrent_renames_to_one_name(
    local: Registry, peer: Registry, raw: redis.asyncio.Redis, rounds: int
) -> None:
    """One succeeds, and the other app keeps its name."""
    for _ in range(rounds):
        await put(local, "one", "one", "acc_one")
        await put(local, "two", "two", "acc_two")
        both = put(local, "one", "same", "acc_one"), put(peer, "two", "same", "acc_two")
        await asyncio.gather(*both, return_exceptions=True)
        one, two = await local.find_app("one"), await local.find_app("two")
        assert one is not None
        assert two is not None
        assert (one.id, two.id) == ("one", "two")
        for app in (one, two):
            await local.delete_app(app)
        assert {*await raw.keys("*")} == ACCOUNT_KEYS
