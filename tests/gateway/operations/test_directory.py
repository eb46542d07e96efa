"""Lists of accounts and apps: all of them, once, in pages; searches within bounds; records of earlier versions."""

from collections.abc import AsyncIterator

import pytest

from gateway.accounts.keys import accounts_key, apps_key
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.operations import directory
from gateway.operations.directory import Directory
from gateway.redis.client import Store
from gateway.redis.partitions import PARTITION_TAGS, partition_tag
from tests.support.redis_servers import cluster


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    store = Store(redis_url)
    yield Registry(store, Vault(""))
    await store.close()


def app(name: str, account: str, **fields: object) -> App:
    return App(id=name, name=name, account=account, createdAt="2026-07-02T10:00:00.000Z", **fields)  # type: ignore[arg-type]


async def all_ids(registry: Registry, what: str, limit: int, search: str = "") -> list[str]:
    """Follows `next` to the end."""
    found, cursor = [], None
    while True:
        if what == "accounts":
            accounts = await Directory(registry).accounts(search, limit, cursor)
            found += [account.id for account in accounts.rows]
            cursor = accounts.next
        else:
            apps = await Directory(registry).apps(search, limit, cursor)
            found += [each.id for each, _ in apps.rows]
            cursor = apps.next
        if cursor is None:
            return found


async def test_lists(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    await lists(registry, monkeypatch)


async def test_lists_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster("valkey") as url:
        store = Store(url)
        registry = Registry(store, Vault(""))
        await lists(registry, monkeypatch)
        await Directory(registry).complete()
        await store.close()


async def lists(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = [(await registry.create_account(f"Käthe {n}", "max"))[0] for n in range(23)]
    names = [f"shop-{n:02d}" for n in range(23)]
    for name, account in zip(names, accounts, strict=True):
        await registry.put_app(app(name, account.id), None)
    newest_first = sorted((account.id for account in accounts), reverse=True)
    for limit in (1, 5, 23, 100):
        assert await all_ids(registry, "accounts", limit) == newest_first
        assert await all_ids(registry, "apps", limit) == names
    assert (await Directory(registry).accounts("", 23, None)).next is None

    for batch, searched in ((200, 2_000), (2, 3)):  # also when a search has to stop before it has seen all
        monkeypatch.setattr(directory, "BATCH", batch)
        monkeypatch.setattr(directory, "SEARCHED", searched)
        assert await all_ids(registry, "accounts", 2, "KÄTHE 7") == [accounts[7].id]
        assert await all_ids(registry, "accounts", 2, accounts[3].id) == [accounts[3].id]
        assert await all_ids(registry, "apps", 2, "op-1") == names[10:20]
        assert await all_ids(registry, "apps", 2, accounts[4].id) == [names[4]]
        assert await all_ids(registry, "apps", 2, "nobody") == []

    taken = await registry.find("shop-03")
    assert taken is not None
    await registry.delete_app(taken)
    moved = await registry.find("shop-04")
    assert moved is not None
    await registry.put_app(app("shop-04", accounts[0].id), moved)
    assert await all_ids(registry, "apps", 4) == [name for name in names if name != "shop-03"]


async def test_what_an_earlier_version_made_is_listed_too(registry: Registry) -> None:
    account, api_key = await registry.create_account("Vreni", "max")
    lonely, lonely_key = await registry.create_account("Ueli", "max")
    await registry.put_app(app("shop", account.id), None)
    for tag in PARTITION_TAGS:
        await registry.store.client.delete(accounts_key(tag), apps_key(tag))
    assert await all_ids(registry, "accounts", 10) == await all_ids(registry, "apps", 10) == []
    await Directory(registry).complete()
    await Directory(registry).complete()
    assert await all_ids(registry, "apps", 10) == ["shop"]
    assert await all_ids(registry, "accounts", 10) == [account.id]
    used = await registry.api_keys.identify(lonely_key)
    assert used is not None
    registry.api_keys.note_use(used)
    await registry.api_keys.write_uses()
    assert set(await all_ids(registry, "accounts", 10)) == {account.id, lonely.id}
    assert api_key


async def test_an_account_that_was_not_made_is_left_out(registry: Registry) -> None:
    """A process may die after it has listed an account, and before it has written its record."""
    tag = partition_tag("acc_gone")
    await registry.store.client.zadd(accounts_key(tag), {"acc_gone": 0})
    assert await all_ids(registry, "accounts", 10) == []
