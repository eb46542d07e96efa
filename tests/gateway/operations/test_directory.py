"""Pages list each account and app once, and searches read a limited number of records."""

import pytest

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.keys import accounts_key, partition_tag
from gateway.operations.directory import Directory
from gateway.redis.client import Store
from tests.support.redis_servers import cluster
from tests.support.stores import opened


@pytest.fixture
def registry(store: Store) -> Registry:
    return Registry(store, Vault(""))


def app(name: str, account: str, **fields: object) -> App:
    return App(id=name, name=name, account=account, createdAt="2026-07-02T10:00:00.000Z", **fields)  # type: ignore[arg-type]


async def all_ids(directory: Directory, what: str, limit: int, search: str = "") -> list[str]:
    """Returns the ids of all pages."""
    found, cursor = [], None
    while True:
        if what == "accounts":
            accounts = await directory.list_accounts(search, limit, cursor)
            found += [account.id for account in accounts.rows]
            cursor = accounts.next
        else:
            apps = await directory.list_apps(search, limit, cursor)
            found += [each.id for each, _ in apps.rows]
            cursor = apps.next
        if cursor is None:
            return found


async def test_lists(registry: Registry) -> None:
    await lists(registry)


async def test_lists_of_a_cluster() -> None:
    with cluster("valkey") as url:
        async with opened(url) as store:
            await lists(Registry(store, Vault("")))


async def lists(registry: Registry) -> None:
    accounts = [(await registry.create_account(f"Käthe {n}", "max"))[0] for n in range(23)]
    names = [f"shop-{n:02d}" for n in range(23)]
    for name, account in zip(names, accounts, strict=True):
        await registry.put_app(app(name, account.id), None)
    newest_first = sorted((account.id for account in accounts), reverse=True)
    directory = Directory(registry)
    for limit in (1, 5, 23, 100):
        assert await all_ids(directory, "accounts", limit) == newest_first
        assert await all_ids(directory, "apps", limit) == names
    assert (await directory.list_accounts("", 23, None)).next is None

    for batch, searched in ((200, 2_000), (2, 3)):  # also if a search stops before the end
        small = Directory(registry, ids_per_read=batch, max_searched=searched)
        assert await all_ids(small, "accounts", 2, "KÄTHE 7") == [accounts[7].id]
        assert await all_ids(small, "accounts", 2, accounts[3].id) == [accounts[3].id]
        assert await all_ids(small, "apps", 2, "op-1") == names[10:20]
        assert await all_ids(small, "apps", 2, accounts[4].id) == [names[4]]
        assert await all_ids(small, "apps", 2, "nobody") == []

    taken = await registry.find_app("shop-03")
    assert taken is not None
    await registry.delete_app(taken)
    moved = await registry.find_app("shop-04")
    assert moved is not None
    await registry.put_app(app("shop-04", accounts[0].id), moved)
    assert await all_ids(directory, "apps", 4) == [name for name in names if name != "shop-03"]


async def test_an_account_without_a_record_is_left_out(registry: Registry) -> None:
    """A process may die after it lists an account, and before it writes the record."""
    tag = partition_tag("acc_gone")
    await registry.store.client.zadd(accounts_key(tag), {"acc_gone": 0})
    assert await all_ids(Directory(registry), "accounts", 10) == []
