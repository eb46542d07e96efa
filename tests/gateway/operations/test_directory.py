"""Pages list each account and app once, and searches read a limited number of records."""

from typing import Any

import msgspec
import pytest

from gateway.accounts.records import Suspension
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.ids import now_iso
from gateway.keys import spenders_key
from gateway.operations.directory import Directory
from gateway.redis.client import Store
from gateway.settings import Plan
from tests.support.registries import an_app


@pytest.fixture
def registry(store: Store) -> Registry:
    return Registry(store, Vault(""))


async def all_ids(directory: Directory, what: str, limit: int, search: str = "", **chosen: Any) -> list[str]:
    """Returns the ids of all pages."""
    found, cursor = [], None
    while True:
        page: Any = await getattr(directory, f"list_{what}")(search, limit, cursor, **chosen)
        found += [each.id for each in page.rows] if what == "accounts" else [each.id for each, _ in page.rows]
        if (cursor := page.next) is None:
            return found


async def test_lists(registry: Registry) -> None:
    accounts = [(await registry.create_account(f"Käthe {n}", "max"))[0] for n in range(23)]
    names = [f"shop-{n:02d}" for n in range(23)]
    for name, account in zip(names, accounts, strict=True):
        await registry.put_app(an_app(name, account.id), None)
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
    await registry.put_app(an_app("shop-04", accounts[0].id), moved)
    assert await all_ids(directory, "apps", 4) == [name for name in names if name != "shop-03"]


async def test_accounts_are_filtered_and_sorted_by_their_spend(registry: Registry) -> None:
    plans: list[Plan] = ["free", "max", "max", "free"]
    accounts = [(await registry.create_account(f"Shop {n}", plan))[0].id for n, plan in enumerate(plans)]
    suspension = Suspension("Unpaid", now_iso())
    await registry.change_account(accounts[1], lambda record: msgspec.structs.replace(record, suspension=suspension))
    key = spenders_key(await registry.store.today())
    spends = {"total": 60, "acc_deleted": 30, accounts[0]: 20, accounts[2]: 5, accounts[1]: 5}
    await registry.store.client.zadd(key, spends)
    await registry.store.client.expire(key, 60)
    for size in (1, 2, 200):
        directory = Directory(registry, ids_per_read=size)
        highest_first = [accounts[0], *sorted(accounts[1:3], reverse=True)]
        for limit in (1, 2, 100):
            assert await all_ids(directory, "accounts", limit, sort="spend") == highest_first
        assert await all_ids(directory, "accounts", 1, sort="spend", plan="max", suspended=False) == [accounts[2]]
        assert await all_ids(directory, "accounts", 1, plan="free") == sorted([accounts[0], accounts[3]], reverse=True)
        assert await all_ids(directory, "accounts", 1, suspended=True) == [accounts[1]]
        assert await all_ids(directory, "accounts", 1, suspended=False, plan="max") == [accounts[2]]
    assert (await Directory(registry).list_accounts("", 1, "acc_unknown", sort="spend")).rows == []
