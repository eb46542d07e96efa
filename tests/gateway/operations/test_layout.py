"""The layout of the data: made-up steps and real ones, run by several processes, interrupted, and refused."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from gateway.accounts.records import Account
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.keys import (
    LAYOUT_KEY,
    LAYOUT_MINOR_KEY,
    PARTITION_TAGS,
    account_key,
    accounts_key,
    api_keys_key,
    deletions_key,
    partition_tag,
    scoped_keys_key,
)
from gateway.operations import layout
from gateway.operations.layout import (
    LAYOUT,
    MINOR_STEPS,
    LayoutFault,
    LayoutStep,
    prepare_data,
    upgrade_redis,
    upgrade_storage,
)
from gateway.redis.client import Store
from gateway.settings import Settings
from gateway.storage import FolderStorage, Storage, read_object
from tests.support.background import cancel
from tests.support.logs import captured
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.registries import an_app
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy


def steps(*names: str, first: Callable[[], Awaitable[None]] | None = None) -> list[LayoutStep]:
    """Returns steps that append their names to a list in Redis, the first one after `first`."""

    def make(name: str, before: Callable[[], Awaitable[None]] | None) -> LayoutStep:
        async def change(store: Store) -> None:
            if before is not None:
                await before()
            await store.client.rpush("steps", name)
            await store.client.expire("steps", 60)

        return LayoutStep(redis=change)

    return [make(name, first if name == names[0] else None) for name in names]


async def names(store: Store) -> list[str]:
    found: list[str] = await store.client.lrange("steps", 0, -1)
    return found


async def test_data_without_a_number_get_one(store: Store, redis_url: str, tmp_path: Path) -> None:
    settings = Settings(redis_url=redis_url, data_dir=str(tmp_path / "data"))
    await store.client.hset("{sites}:hosts", "host", "1")  # which the first step removes
    await prepare_data(settings)
    assert await store.list_keys() == {LAYOUT_KEY, LAYOUT_MINOR_KEY}
    with captured(layout) as lines:
        await prepare_data(settings)
    assert await store.get(LAYOUT_KEY) == str(LAYOUT)
    assert (tmp_path / "data" / "layout").read_text() == f"{LAYOUT}\n"
    assert not lines


async def test_processes_that_start_together(redis_url: str, store: Store) -> None:
    running: list[int] = []

    async def take_long() -> None:
        running.append(1)
        await asyncio.sleep(0.3)

    async def start() -> None:
        async with opened(redis_url) as own:
            await upgrade_redis(own, steps("a", "b", first=take_long))
            assert await own.get(LAYOUT_KEY) == "3"

    await asyncio.gather(*(start() for _ in range(3)))
    assert (running, await names(store)) == ([1], ["a", "b"])


async def test_minor_steps_have_a_number_of_their_own(store: Store) -> None:
    """A newer one stops nothing, and stays, so that the newer version does not repeat its steps."""
    for minor in (("x",), ("x", "y"), ("x",)):
        await upgrade_redis(store, steps("a", "b"), steps(*minor))
    await upgrade_redis(store, steps("a", "b", "c"), steps("x"))
    assert await names(store) == ["a", "b", "x", "y", "c"], "each step runs once, in order"
    assert await store.client.mget(LAYOUT_KEY, LAYOUT_MINOR_KEY) == ["4", "3"]


async def test_a_newer_layout(store: Store, tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    await store.client.set(LAYOUT_KEY, LAYOUT + 1)
    await storage.put("layout", f"{LAYOUT + 2}".encode())
    sentence = "^The data are of layout {}, and this version knows {}: start the newer version"
    with pytest.raises(LayoutFault, match=sentence.format(LAYOUT + 1, LAYOUT)):
        await upgrade_redis(store)
    with pytest.raises(LayoutFault, match=sentence.format(LAYOUT + 2, LAYOUT)):
        await upgrade_storage(store, storage)
    await store.client.set(LAYOUT_KEY, "restoring 2026-07-02")
    with pytest.raises(LayoutFault, match="if a restore was interrupted, run it again"):
        await upgrade_redis(store)
    await store.client.delete(LAYOUT_KEY)


async def test_the_storage_has_its_own_number(store: Store, tmp_path: Path) -> None:
    storage, done = FolderStorage(tmp_path), list[str]()

    async def change(given: Storage) -> None:
        await given.put("logs/changed", b"")
        done.append("storage")

    made = [LayoutStep(storage=change)]
    await upgrade_redis(store, made)
    assert not done
    await upgrade_storage(store, storage, made)
    await upgrade_storage(store, storage, made)
    assert (done, await read_object(storage, "layout", 10)) == (["storage"], b"2\n")


async def test_a_redis_that_has_lost_its_data(store: Store, redis_url: str, tmp_path: Path) -> None:
    settings = Settings(redis_url=redis_url, data_dir=str(tmp_path))
    (tmp_path / "sources" / "app").mkdir(parents=True)
    (tmp_path / "layout").write_text(str(LAYOUT))
    await store.client.mset({LAYOUT_KEY: LAYOUT, LAYOUT_MINOR_KEY: 1 + len(MINOR_STEPS)})
    with captured(layout) as lines:
        await prepare_data(settings)
        assert [(line["event"], line["folder"]) for line in lines] == [("redis.empty", "sources/")]
        assert "restore a backup" in lines[0]["action"]
        lines.clear()
        await store.client.zadd(accounts_key(PARTITION_TAGS[3]), {"acc_1": 0})
        await prepare_data(settings)
        assert not lines


async def test_a_process_that_dies_while_it_moves_records(valkey: RedisServer, store: Store) -> None:
    """Scoped keys, and accounts that are being deleted, both of which the version before would misread."""
    registry, accounts = Registry(store, Vault("")), list[Account]()
    for number in range(20):
        account, _ = await registry.create_account(f"Account {number}", "free")
        await registry.api_keys.create(account.id, "deploys", "deploy")
        await registry.api_keys.create(account.id, "reads", "read", an_app("app_1", account.id))
        records = await store.client.hgetall(scoped_keys_key(account.id))
        await store.client.hset(api_keys_key(account.id), mapping=records)
        await store.client.delete(scoped_keys_key(account.id))
        leaving = msgspec.to_builtins(account) | {"deletion": {"at": account.createdAt, "deletesAt": account.createdAt}}
        await store.client.set(account_key(account.id), msgspec.json.encode(leaving))
        await store.client.zadd(deletions_key(partition_tag(account.id)), {account.id: 1})
        accounts.append(account)
    async with Proxy(valkey.port) as proxy, opened(proxy.url) as dying:
        proxy.hold_requests = api_keys_key(accounts[9].id).encode()
        task = asyncio.create_task(upgrade_redis(dying, lock_seconds=1))
        await wait_until(lambda: proxy.held)
        proxy.go_down()
        await cancel(task)
    assert await store.client.hlen(api_keys_key(accounts[9].id)) == 3
    await upgrade_redis(store)
    for account in accounts:
        listed = {key.name: (key.scope, key.app) for key in await registry.list_keys(account.id)}
        assert listed == {"first": ("full", None), "deploys": ("deploy", None), "reads": ("read", "app_1")}
        [full] = await store.client.hvals(api_keys_key(account.id))
        assert msgspec.json.decode(full)["name"] == "first"
        record = msgspec.json.decode(await store.get(account_key(account.id)) or "")
        assert record["suspension"] == {"reason": "The account is being deleted.", "at": account.createdAt}
        assert record["deletion"]["deletesAt"] == account.createdAt
