"""Scripts in a cluster of three primaries, with redirections, lost nodes and seeds that are down."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from redis.crc import key_slot

from gateway.accounts import scripts as accounts_scripts
from gateway.accounts.registry import Registry
from gateway.accounts.session_store import Person, SessionStore
from gateway.accounts.vault import Vault
from gateway.deploys import scripts as deploys_scripts
from gateway.errors import BackboneUnavailable
from gateway.events import scripts as events_scripts
from gateway.events.records import QueuedEvent
from gateway.keys import (
    PARTITION_TAGS,
    REGISTRATIONS_KEY,
    bodies_key,
    deliveries_key,
    deploy_key,
    ended_deploys_key,
    outcomes_key,
    partition_tag,
    site_key,
    stream_key,
)
from gateway.redis.client import Store
from gateway.redis.scripts import increment_counters
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, ReplicatedCluster, free_port
from tests.support.stores import opened


async def count_everywhere(store: Store) -> None:
    """Runs a script in each partition at once."""
    await asyncio.gather(
        *(increment_counters(store, f"{tag}:tests", "hash", 60, {"calls": 1}) for tag in PARTITION_TAGS)
    )


def slot_of(tag: str) -> int:
    return key_slot(tag.strip("{}").encode())


def tag_on(servers: ReplicatedCluster, index: int) -> str:
    return next(tag for tag in PARTITION_TAGS if servers.owner(slot_of(tag)) == index)


async def passes(store: Store, tag: str) -> bool:
    try:
        await increment_counters(store, f"{tag}:tests", "hash", 60, {"calls": 1})
    except BackboneUnavailable:
        return False
    return True


async def test_people(cluster: ReplicatedCluster) -> None:
    """An address has accounts in several partitions."""
    async with opened(cluster.url) as store:
        registry, sessions = Registry(store, Vault("")), SessionStore(store)
        members = registry.members
        own = await registry.register_person("ada@example.com", 10)
        accounts = [own, *[(await registry.create_account("Another", "free"))[0] for _ in range(5)]]
        token = await sessions.open(str(Person("ada@example.com", own.id)))
        for account in accounts:
            for email in ("ada@example.com", "bob@example.com"):
                await members.put(account.id, email, "owner")
        assert {each.account.id for each in await members.list_accounts("ada@example.com")} == {a.id for a in accounts}
        for account in accounts:
            assert await members.remove(account.id, "ada@example.com")
            await members.set_role(account.id, "eve@example.com", "viewer", "API key")
        assert len(await members.list_invitations("eve@example.com")) == len(accounts)
        for account in accounts:
            await members.accept(account.id, "eve@example.com")
        assert len(await members.list_accounts("eve@example.com")) == len(accounts)
        await sessions.close_membership("ada@example.com", own.id)
        assert await sessions.find_subject(token) is None
        assert await members.list_accounts("ada@example.com") == []


async def test_a_seed_that_is_down_is_skipped(cluster: ReplicatedCluster) -> None:
    alive = f"127.0.0.1:{cluster.primaries[1].port}"
    async with opened(f"redis+cluster://127.0.0.1:{free_port()},{alive}") as store:
        await count_everywhere(store)
        assert {await store.client.hget(f"{tag}:tests", "calls") for tag in PARTITION_TAGS} == {"1"}
        async with store.subscription("changes") as subscription:
            assert (await subscription.get_message(timeout=10))["type"] == "subscribe"


def begin_move(source: RedisServer, target: RedisServer, slot: int) -> None:
    with source.client() as old, target.client() as new:
        new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old.execute_command("CLUSTER MYID"))
        old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new.execute_command("CLUSTER MYID"))


def move_keys(source: RedisServer, target: RedisServer, slot: int) -> None:
    with source.client() as old:
        while found := old.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
            old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 2000, "KEYS", *found)


def end_move(source: RedisServer, target: RedisServer, slot: int) -> None:
    with source.client() as old, target.client() as new:
        own = new.execute_command("CLUSTER MYID")
        new.execute_command("CLUSTER SETSLOT", slot, "NODE", own)
        old.execute_command("CLUSTER SETSLOT", slot, "NODE", own)


def ends_of_move(cluster: ReplicatedCluster, slot: int) -> tuple[RedisServer, RedisServer]:
    """Returns the primary that has the slot, and another one."""
    owner = cluster.owner(slot)
    return cluster.primaries[owner], cluster.primaries[(owner + 1) % 3]


def move(source: RedisServer, target: RedisServer, slot: int) -> None:
    for step in (begin_move, move_keys, end_move):
        step(source, target, slot)


async def test_a_slot_moves_under_load(cluster: ReplicatedCluster) -> None:
    """Nodes answer ASK while the keys move, and MOVED afterwards. No call fails, and each runs once.

    A stream is read as before.
    """
    slot, stream = slot_of("{p09}"), "{p09}:events"
    source, target = ends_of_move(cluster, slot)
    async with opened(cluster.url) as store:
        calls, reads = 0, store.blocking_client()

        async def call() -> None:
            nonlocal calls
            await increment_counters(store, "{p09}:tests", "hash", 60, {"calls": 1})
            calls += 1

        async def read() -> Any:
            with suppress(BackboneUnavailable):  # a worker tries again, too
                return await reads.xreadgroup("readers", "one", {stream: ">"}, count=10, block=1000)

        await call()
        await store.client.xgroup_create(stream, "readers", mkstream=True)
        for step in (begin_move, move_keys, end_move):
            await asyncio.to_thread(step, source, target, slot)
            await asyncio.gather(*(call() for _ in range(20)))
            await store.client.xadd(stream, {"step": step.__name__})
            [[_, [(_, fields)]]] = await wait_until(read)
            assert fields == {"step": step.__name__}
        await call()
        await reads.aclose()
        with target.client() as client:
            assert int(client.hget("{p09}:tests", "calls")) == calls == 62
    await asyncio.to_thread(move, target, source, slot)


async def test_no_script_runs_on_half_of_a_partition(cluster: ReplicatedCluster) -> None:
    """A script would create a key that has already moved: a limit would be lost, and the migration would fail."""
    account = next(id for id in map("acc_{}".format, range(1000)) if partition_tag(id) == "{p09}")
    first, second = (QueuedEvent(id, account, "app", "app.crashed", "{}") for id in ("evt_1", "evt_2"))
    fails = deploys_scripts.Transition(
        account, "app", "dep_1", "live", {"state": "failed", "id": "dep_1", "account": account}
    )
    registrations = f"{REGISTRATIONS_KEY}:{time.strftime('%Y-%m-%d', time.gmtime())}"
    async with opened(cluster.url, command_seconds=0.5) as store:
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            bodies_key(account): lambda: events_scripts.emit_event(store, second),
            ended_deploys_key("{p09}"): lambda: deploys_scripts.advance_deploy(store, fails),
            registrations: lambda: accounts_scripts.count_registration(store, 1),
        }
        await store.client.hset(deploy_key(account, "dep_1"), mapping={"state": "live", "address": "live"})
        for hash in (site_key(account, "app"), outcomes_key("{p09}"), ended_deploys_key("{p09}")):
            await store.client.hset(hash, "live", 1)
        for stream in (stream_key("{p09}", "builds"), deliveries_key(account)):
            await store.client.xadd(stream, {"id": "x"})
        await events_scripts.emit_event(store, first)
        assert (await accounts_scripts.count_registration(store, 1)).verdict == "counted"
        for part, call in calls.items():
            slot = slot_of(part.partition(":")[0])
            home, away = ends_of_move(cluster, slot)
            await asyncio.to_thread(begin_move, home, away, slot)
            with home.client() as client:
                client.execute_command("MIGRATE", "127.0.0.1", away.port, part, 0, 2000)
            with pytest.raises(BackboneUnavailable):
                await call()
            for step in (move_keys, end_move):
                await asyncio.to_thread(step, home, away, slot)
            await asyncio.to_thread(move, away, home, slot)
        await events_scripts.emit_event(store, second)
        assert await deploys_scripts.advance_deploy(store, fails)
        assert (await accounts_scripts.count_registration(store, 1)).verdict == "full"
        assert set(await store.client.hgetall(bodies_key(account))) == {"evt_1", "evt_2"}
        assert await store.client.hgetall(ended_deploys_key("{p09}")) == {"live": "1", "failed": "1"}


async def test_a_lost_primary_is_replaced(cluster: ReplicatedCluster) -> None:
    async with opened(cluster.url) as store:
        await count_everywhere(store)
        cluster.primaries[0].kill()
        assert not await passes(store, tag_on(cluster, 0))
        assert await passes(store, tag_on(cluster, 1)), "the others are served meanwhile"
        await asyncio.to_thread(cluster.fail_over, 0)

        await wait_until(lambda: passes(store, tag_on(cluster, 0)), 10)
        await asyncio.to_thread(cluster.fail_back, 0)


async def test_a_primary_that_starts_again_is_a_change(cluster: ReplicatedCluster) -> None:
    """It may lack what it confirmed last."""
    changes: list[int] = []
    async with opened(cluster.url) as store:
        store.on_change(lambda: changes.append(1))
        await count_everywhere(store)
        assert not changes
        cluster.primaries[1].kill()
        cluster.primaries[1].start()
        await wait_until(lambda: passes(store, tag_on(cluster, 1)), 10)
        await wait_until(lambda: changes)
