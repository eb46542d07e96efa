"""Accounts and their keys as the registry creates them, and names that it never looks up."""

import msgspec
import pytest

from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
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
