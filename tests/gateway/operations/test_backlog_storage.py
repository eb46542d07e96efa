"""Dead letters and the storage of accounts, over all partitions."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import BackboneRefused
from gateway.events import scripts
from gateway.events.catalog import AppCrashed
from gateway.events.deliveries import count_stored_bytes
from gateway.events.webhooks import Webhooks
from gateway.keys import PARTITION_TAGS, bodies_key, dead_letters_key, partition_tag, stream_key
from gateway.operations.backlog import count_dead_letters, read_dead_letters, read_storage
from gateway.redis.client import Store
from tests.support.redis_servers import cluster
from tests.support.stores import opened

CRASH = AppCrashed(reason="oom", exitCode=137, at="2026-07-02T10:00:00.000Z")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with cluster("redis") as address:
        yield address


@pytest_asyncio.fixture
async def store(url: str) -> AsyncIterator[Store]:
    """Empties."""
    async with opened(url) as store:
        await everywhere(store, "FLUSHALL")
        yield store


async def everywhere(store: Store, *command: str) -> None:
    assert store._commands is not None
    await store._commands.call_everywhere(*command)


async def add_letter(store: Store, tag: str, number: int) -> None:
    key = stream_key(tag, "events")
    await store.client.xgroup_create(key, "webhooks", "0", mkstream=True)
    entry = await store.client.xadd(key, {"n": number})
    await store.client.xreadgroup("webhooks", "one", {key: ">"})
    fields = {"n": str(number), "long": "x" * 1000}
    assert await scripts.dead_letter(
        store, tag, "events", fields, None, group="webhooks", entry=entry, reason=f"ValueError: {number}"
    )


async def test_the_newest_dead_letters_of_all_partitions(store: Store) -> None:
    for number, tag in enumerate(PARTITION_TAGS):
        await add_letter(store, tag, number)
    letters = await read_dead_letters(store)
    assert letters.count == await count_dead_letters(store) == 16
    assert len(letters.newest) == 10
    assert sorted(letters.newest, key=lambda letter: letter.at, reverse=True) == letters.newest
    assert {letter.stream for letter in letters.newest} == {"events"}
    for letter in letters.newest:
        assert letter.reason == f"ValueError: {letter.fields['n']}"
        assert letter.fields["long"] == "x" * 256


async def test_a_foreign_letter_hides_no_other(store: Store) -> None:
    await add_letter(store, "{p19}", 1)
    await store.client.xadd(dead_letters_key("{p19}"), {"fields": "[", "odd": "1"})
    odd, whole = (await read_dead_letters(store)).newest
    assert (odd.stream, odd.reason, odd.fields) == ("", "", {})
    assert whole.reason == "ValueError: 1"


@pytest.mark.parametrize("expired", [False, True])
async def test_a_full_redis_accepts_no_event(store: Store, expired: bool) -> None:
    """Redis refuses a script only before its first write, and only for commands that may need memory."""
    account = "acc_1"
    webhooks, app = Webhooks(store, Vault(""), allow_private=True), App(id="a", name="a", account=account, createdAt="")
    await webhooks.emit(app, CRASH)
    if expired:
        await store.client.delete(bodies_key(account))
    stream = stream_key(partition_tag(account), "events")
    await everywhere(store, "CONFIG", "SET", "maxmemory", "1")
    try:
        for _ in range(3):
            with pytest.raises(BackboneRefused):
                await webhooks.emit(app, CRASH)
    finally:
        await everywhere(store, "CONFIG", "SET", "maxmemory", "0")
    assert await store.client.xlen(stream) == 1
    await webhooks.emit(app, CRASH)
    assert await store.client.xlen(stream) == 2


async def test_the_accounts_that_store_the_most(store: Store) -> None:
    registry = Registry(store, Vault(""))
    webhooks = Webhooks(store, Vault(""), allow_private=True)
    accounts = [(await registry.create_account(f"Account {n}", "free"))[0] for n in range(10)]
    for n, account in enumerate(accounts):
        for _ in range(n + 1):
            await webhooks.emit(App(id="app", name="app", account=account.id, createdAt=""), CRASH)
    storage = await read_storage(store, registry)
    assert [row.name for row in storage.top] == [f"Account {n}" for n in range(9, 1, -1)]
    assert storage.top[0].bytes == await count_stored_bytes(store, accounts[9].id) == 10 * storage.top[-1].bytes / 3

    # The log and the events of one account expire.
    gone = accounts[9].id
    await store.client.delete(bodies_key(gone))
    assert gone not in {row.account for row in (await read_storage(store, registry)).top}
    assert await count_stored_bytes(store, gone) == 0
    assert await count_stored_bytes(store, accounts[8].id) == storage.top[1].bytes
