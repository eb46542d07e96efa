"""One worker of a cluster at a time follows the serving records."""

import asyncio

import pytest

from gateway.deploys.serving import Records
from gateway.keys import ENGINE_KEY
from gateway.redis.client import Store
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy
from workers.kubernetes import run
from workers.kubernetes.run import TakenOver


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RENEWAL_SECONDS", 0.05)


async def test_a_worker_stands_by_until_no_other_is_the_engine(store: Store) -> None:
    async def follow(stopping: asyncio.Event) -> None:
        async with run._hold_engine(Records(store), "apps") as lost:
            holders.append(stopping)
            await stopping.wait()
            assert not lost.done()

    holders: list[asyncio.Event] = []
    first, second = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(follow(first))
        await wait_until(lambda: holders == [first])
        group.create_task(follow(second))
        await asyncio.sleep(0.3)
        assert holders == [first]
        first.set()
        await wait_until(lambda: holders == [first, second])
        second.set()
    assert not await store.client.exists(ENGINE_KEY)


async def test_a_worker_that_was_taken_over_learns_it(store: Store) -> None:
    async with run._hold_engine(Records(store), "apps") as lost:
        await store.client.set(ENGINE_KEY, '{"id":"other","name":"another worker"}', px=5_000)
        with pytest.raises(TakenOver):
            await asyncio.wait_for(lost, 5)
    assert "another worker" in (await store.get(ENGINE_KEY) or "")


async def test_an_outage_ends_no_engine(valkey: RedisServer, store: Store) -> None:
    """While Redis is away, nobody else can take it. Afterwards, it is renewed."""
    async with (
        Proxy(valkey.port) as proxy,
        opened(proxy.url) as own,
        run._hold_engine(Records(own), "apps") as lost,
    ):
        proxy.go_down()
        await asyncio.sleep(0.3)
        await store.client.delete(ENGINE_KEY)
        proxy.down = False
        await wait_until(lambda: store.client.exists(ENGINE_KEY))
        assert not lost.done()
    assert not await store.client.exists(ENGINE_KEY)
