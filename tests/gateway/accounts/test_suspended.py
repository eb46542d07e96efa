"""The list of suspended apps and accounts that hosts follow."""

import pytest
from msgspec.structs import replace

from gateway.accounts.records import Suspension
from gateway.accounts.registry import Registry
from gateway.accounts.suspended import SuspendedList, list_suspended, unlist_suspended
from gateway.errors import BackboneUnavailable
from gateway.keys import PARTITION_TAGS
from gateway.redis.client import Store
from tests.support.redis_servers import free_port
from tests.support.registries import an_app
from tests.support.stores import opened


async def test_hosts_read_what_has_changed(store: Store) -> None:
    accounts = [f"acc_{n}" for n in range(40)]  # in all partitions
    listed = SuspendedList(store)
    await listed.read_changes()
    assert listed.changes == 0
    for account in accounts:
        await list_suspended(store, account, "shop")
    await list_suspended(store, accounts[0])
    await listed.read_changes()
    assert listed.changes == len(PARTITION_TAGS)
    assert all((account, "shop") in listed for account in accounts)
    assert (accounts[0], "other") in listed, "an app of a suspended account"
    assert (accounts[1], "other") not in listed
    await listed.read_changes(everything=True)
    assert listed.changes == len(PARTITION_TAGS), "nothing has changed"
    for account in accounts:
        await unlist_suspended(store, account, "shop")
        await unlist_suspended(store, account, "shop")
    await unlist_suspended(store, accounts[0])
    await listed.read_changes()
    assert not any((account, "shop") in listed for account in accounts)


async def test_an_app_that_moves_is_listed_for_its_new_account(local: Registry) -> None:
    app = an_app()
    await local.put_app(app, None)
    await list_suspended(local.store, "acc_one", "shop")
    suspension = Suspension("test", "2026-07-02T10:00:00.000Z")
    before = await local.change_app(app, lambda record: replace(record, suspension=suspension))
    moved = await local.put_app(replace(app, account="acc_two", name="store"), before)
    assert moved.suspension == suspension
    listed = SuspendedList(local.store)
    await listed.read_changes()
    assert ("acc_one", "shop") not in listed
    assert ("acc_two", "shop") in listed
    await local.delete_app(moved)
    await listed.read_changes()
    assert ("acc_two", "shop") not in listed


async def test_without_redis_nothing_is_known() -> None:
    async with opened(f"redis://127.0.0.1:{free_port()}/0") as away:
        listed = SuspendedList(away)
        with pytest.raises(BackboneUnavailable):
            await listed.read_changes()
        assert listed.changes == 0
        with pytest.raises(BackboneUnavailable):
            await list_suspended(away, "acc_one", "shop")
