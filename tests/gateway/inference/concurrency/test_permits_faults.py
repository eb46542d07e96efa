"""Permits when processes die, messages are lost, or Redis is away."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.crc import key_slot

from gateway.errors import BackboneUnavailable
from gateway.inference.concurrency import scripts
from gateway.inference.concurrency.lease_replies import read_share
from gateway.inference.concurrency.permits import Permits
from gateway.redis import client as store_module
from gateway.redis.client import Store
from tests.gateway.inference.permit_processes import Cluster, Provider, cluster, ready, take
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, replicated_cluster

__all__ = ["cluster"]


async def test_a_killed_processes_permits_are_free_after_its_lease(cluster: Cluster) -> None:
    options = {"bound": 6, "lease": 1.2, "renewal": 0.2}
    one, two = cluster.start(**options), cluster.start(**options)
    await take(one, 6)
    await asyncio.sleep(0.5)
    waiting = [asyncio.create_task(two.wait("acc", "app", 1)) for _ in range(6)]
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await cluster.kill(one)
    await asyncio.gather(*waiting)
    assert 0.7 < time.monotonic() - began < 3.2


async def test_a_killed_processes_waiting_requests_hold_nobody_up(cluster: Cluster) -> None:
    one, two, three = (cluster.start(bound=4) for _ in range(3))
    held = await take(one, 4)
    crowd = [asyncio.create_task(two.wait("crowd", "app", 1)) for _ in range(60)]
    await asyncio.sleep(0.1)
    await cluster.kill(two)
    for task in crowd:
        task.cancel()
    await asyncio.sleep(1.1)
    for permit in held:
        one.release(permit)
    began = time.monotonic()
    assert len(await take(three, 4)) == 4
    assert time.monotonic() - began < 1


async def test_a_stopped_process_gives_everything_back(cluster: Cluster) -> None:
    one, two = cluster.start(bound=8), cluster.start(bound=8)
    await ready(one)
    await ready(two)
    for permit in await take(one, 8):
        one.release(permit)
    await cluster.stop(one)
    began = time.monotonic()
    assert len(await take(two, 8)) == 8
    assert time.monotonic() - began < 1


async def test_messages_that_are_lost(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = cluster.start(bound=4), cluster.start(bound=4)
    await wait_until(lambda: one._low > 0 and two._low > 0)  # both have a lease, of however many of the four permits
    for permits in (one, two):
        monkeypatch.setattr(permits, "_hear", lambda channel, text: None)
    provider = Provider()
    waits = await asyncio.gather(*(provider.request((one, two)[n % 2], "acc", 0.01) for n in range(40)))
    assert provider.most <= 4
    assert max(waits) < 4


async def test_a_subscription_that_is_lost_comes_back(cluster: Cluster, valkey: RedisServer) -> None:
    one, two = cluster.start(bound=2), cluster.start(bound=2)
    held = await take(one, 2)
    await wait_until(lambda: two._listening)
    with valkey.client() as client:
        client.execute_command("CLIENT KILL TYPE pubsub")
    await wait_until(lambda: not two._listening)
    waiting = asyncio.create_task(two.wait("acc", "app", 1))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    one.release(held[0])
    await waiting
    assert time.monotonic() - began < 1
    await wait_until(lambda: two._listening)


@pytest.fixture
async def own(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Cluster, RedisServer]]:
    """A server that a test may freeze."""
    server = RedisServer("valkey").start()
    cluster = Cluster(server.url)
    yield cluster, server
    server.thaw()
    for permits in [*cluster.running]:
        await cluster.kill(permits)
    server.stop()


async def test_redis_away_for_a_while(own: tuple[Cluster, RedisServer]) -> None:
    """Freed permits go to the process's own waiting requests, and the bound holds before, meanwhile and after."""
    cluster, server = own
    provider, bound = Provider(), 12
    processes = [cluster.start(bound=bound) for _ in range(3)]
    end = time.monotonic() + 7

    async def ask(permits: Permits, account: str) -> None:
        while time.monotonic() < end:
            await provider.request(permits, account, random.uniform(0.03, 0.1))

    tasks = [asyncio.create_task(ask(p, f"acc{n}")) for p in processes for n in range(8)]
    await asyncio.sleep(1)
    server.freeze()
    await asyncio.sleep(0.5)
    busy = provider.busy
    await asyncio.sleep(2.5)
    while_away = (provider.busy - busy) / (2.5 * bound)
    server.thaw()
    await asyncio.sleep(1)
    busy = provider.busy
    await asyncio.sleep(1)
    afterwards = (provider.busy - busy) / bound
    await asyncio.gather(*tasks)
    assert provider.most == bound
    assert while_away > 0.5
    assert afterwards > 0.75  # 0.95 on a machine that does nothing else


async def test_the_node_of_the_permits_fails_over() -> None:
    """In Redis Cluster one node has all permits. They are in use while it is away, and the bound holds throughout."""
    with replicated_cluster() as servers:
        cluster, provider, bound = Cluster(servers.url), Provider(), 12
        processes = [cluster.start(bound=bound) for _ in range(3)]
        stopping = False

        async def ask(permits: Permits, account: str) -> None:
            while not stopping:
                await provider.request(permits, account, random.uniform(0.03, 0.1))

        tasks = [asyncio.create_task(ask(p, f"acc{n}")) for p in processes for n in range(8)]
        await wait_until(lambda: provider.now == bound)
        node = servers.owner(key_slot(b"provider"))
        servers.primaries[node].kill()
        await asyncio.sleep(1)
        assert provider.now > 0
        await asyncio.to_thread(servers.fail_over, node)
        for permits in processes:
            await wait_until(lambda permits=permits: permits._answered and not permits._alone, timeout=10)
        await wait_until(lambda: provider.now == bound, timeout=10)
        stopping = True
        await asyncio.gather(*tasks)
        for permits in [*cluster.running]:
            await cluster.kill(permits)
        assert provider.most == bound


async def test_a_lost_answer_said_that_redis_forgot_who_waits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis forgets the waiting requests of a process that is silent, and tells it once, when it calls again."""
    silent, other = (cluster.start(bound=1, renewal=0.1) for _ in range(2))
    [held] = await take(other, 1)
    turns = [silent.join(f"acc{n}", "app", 1) for n in range(3)]
    run, way, observer = scripts.lease, "cut", cluster.running[other][1]

    async def lease(store: Store, name: str, *call: Any, **options: Any) -> Any:
        nonlocal way
        if name == silent.name and way == "cut":
            raise BackboneUnavailable
        answer = await run(store, name, *call, **options)
        if name == silent.name and way == "answer lost":
            way = "whole"
            raise BackboneUnavailable
        return answer

    async def waiting() -> int:
        return len((await read_share(observer)).waiting)

    async def all_wait() -> bool:
        return await waiting() == 3

    async def none_waits() -> bool:
        return await waiting() == 0

    await wait_until(all_wait)
    monkeypatch.setattr(scripts, "lease", lease)
    await wait_until(none_waits)
    way = "answer lost"
    await wait_until(all_wait)
    for turn in turns:
        turn.leave(BackboneUnavailable())
    other.release(held)


async def test_redis_away_for_longer_than_the_lease(
    own: tuple[Cluster, RedisServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "ATTEMPT", 0.5)
    cluster, server = own
    options: dict[str, Any] = {"bound": 4, "lease": 1.2, "renewal": 0.2, "patience": 30.0}
    one, two = cluster.start(**options), cluster.start(**options)
    held = await take(one, 4)
    waiting = [asyncio.create_task(p.wait("acc", "app", 1)) for p in (one, two) for _ in range(2)]
    await asyncio.sleep(0.3)
    server.freeze()
    await asyncio.sleep(1.5)
    one.release(held[0])  # its lease is over: nobody may take it
    await asyncio.sleep(0.2)
    assert (one.used, two.used) == (3, 0)
    server.thaw()
    await wait_until(lambda: one.used + two.used == 4, timeout=10)
    await asyncio.sleep(0.5)
    assert one.used + two.used == 4
    for permit in held[1:]:
        one.release(permit)
    await asyncio.gather(*waiting)
    assert one.used + two.used == 4
