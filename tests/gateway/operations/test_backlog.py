"""Dead letters and the storage of accounts, over all partitions."""

import pytest

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import BackboneRefused
from gateway.events import scripts
from gateway.events.catalog import AppCrashed
from gateway.events.deliveries import count_stored_bytes
from gateway.events.webhooks import Webhooks
from gateway.keys import PARTITION_TAGS, bodies_key, partition_tag, stream_key
from gateway.operations.backlog import count_dead_letters, read_dead_letters, read_storage
from gateway.redis.client import Store

CRASH = AppCrashed(reason="oom", exitCode=137, at="2026-07-02T10:00:00.000Z")


async def test_the_newest_dead_letters_of_all_partitions(store: Store) -> None:
    for number, tag in enumerate(PARTITION_TAGS):
        key = stream_key(tag, "events")
        await store.client.xgroup_create(key, "webhooks", "0", mkstream=True)
        entry = await store.client.xadd(key, {"n": number})
        await store.client.xreadgroup("webhooks", "one", {key: ">"})
        fields, reason = {"n": str(number), "long": "x" * 1000}, f"ValueError: {number}"
        assert await scripts.dead_letter(
            store, tag, "events", fields, None, group="webhooks", entry=entry, reason=reason
        )
    letters = await read_dead_letters(store)
    assert letters.count == await count_dead_letters(store) == 16
    assert len(letters.newest) == 10
    assert sorted(letters.newest, key=lambda letter: letter.at, reverse=True) == letters.newest
    for letter in letters.newest:
        assert letter.stream == "events"
        assert letter.reason == f"ValueError: {letter.fields['n']}"
        assert letter.fields["long"] == "x" * 256


async def test_a_full_redis_accepts_no_event(store: Store) -> None:
    """Redis refuses a script only before its first write, and only for commands that may need memory."""
    webhooks, app = Webhooks(store, Vault(""), allow_private=True), App(id="a", name="a", account="acc_1", createdAt="")
    await webhooks.emit(app, CRASH)
    stream = stream_key(partition_tag("acc_1"), "events")
    await store.client.config_set("maxmemory", 1)
    try:
        for _ in range(3):
            with pytest.raises(BackboneRefused):
                await webhooks.emit(app, CRASH)
    finally:
        await store.client.config_set("maxmemory", 0)
    assert await store.client.xlen(stream) == 1
    await webhooks.emit(app, CRASH)
    assert await store.client.xlen(stream) == 2


async def test_the_accounts_that_store_the_most(store: Store) -> None:
    registry, webhooks = Registry(store, Vault("")), Webhooks(store, Vault(""), allow_private=True)
    accounts = [(await registry.create_account(f"Account {n}", "free"))[0] for n in range(10)]
    for n, account in enumerate(accounts):
        for _ in range(n + 1):
            await webhooks.emit(App(id="app", name="app", account=account.id, createdAt=""), CRASH)
    storage = await read_storage(store, registry)
    assert [row.name for row in storage.top] == [f"Account {n}" for n in range(9, 1, -1)]
    assert storage.top[0].bytes == await count_stored_bytes(store, accounts[9].id) == 10 * storage.top[-1].bytes / 3
    await store.client.delete(bodies_key(accounts[9].id))  # as when its log and its events expire
    assert [row.name for row in (await read_storage(store, registry)).top] == [f"Account {n}" for n in range(8, 1, -1)]
    assert await count_stored_bytes(store, accounts[9].id) == 0
