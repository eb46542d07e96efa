"""The heartbeat of a worker that reads no stream."""

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager

from gateway.keys import HEARTBEAT_SECONDS, WORKER_STARTS_KEY, WORKER_STARTS_SECONDS, worker_key
from gateway.operations.backlog import count_worker_starts
from gateway.redis.client import Store
from tests.support.background import in_background
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.stores import opened
from workers import heartbeat


def beating(
    store: Store, renewal_seconds: float = heartbeat.RENEWAL_SECONDS
) -> AbstractAsyncContextManager[asyncio.Task[None]]:
    return in_background(heartbeat.keep_heartbeat(store, "monitors", renewal_seconds))


def key(number: int) -> str:
    return worker_key("monitors", heartbeat.worker_name(number))


async def test_each_worker_of_a_host_has_its_own_number(store: Store) -> None:
    async with beating(store):
        await wait_until(lambda: store.client.exists(key(1)))
        async with beating(store):
            await wait_until(lambda: store.client.exists(key(2)))
        assert await store.client.get(key(1)) != await store.client.get(key(2))
    assert 0 < await store.client.ttl(key(1)) <= HEARTBEAT_SECONDS


async def test_a_heartbeat_is_renewed(store: Store) -> None:
    async with beating(store, 0.05):
        await wait_until(lambda: store.client.exists(key(1)))
        await store.client.expire(key(1), 2)
        await wait_until(lambda: store.client.ttl(key(1)), holds=lambda left: left > 2)
        await store.client.delete(key(1))
        await wait_until(lambda: store.client.exists(key(1)))
        assert not await store.client.exists(key(2))


async def count_starts(store: Store, after: float = 0) -> int:
    seconds, _ = await store.client.time()
    return (await count_worker_starts(store, int((seconds + after) * 1000)))["monitors"]


async def test_a_worker_that_starts_again_and_again_is_noticed(store: Store) -> None:
    """Its former heartbeat may go on for a while, or the next worker may have its name."""
    await store.client.zadd(WORKER_STARTS_KEY, {"monitors:long-ago:x": 1})
    for starts in range(1, 4):
        async with beating(store):
            await wait_until(lambda: count_starts(store), holds=lambda found, expected=starts: found == expected)
        await store.client.delete(key(1))
    assert await count_starts(store, after=WORKER_STARTS_SECONDS + 1) == 0
    assert await store.client.zcard(WORKER_STARTS_KEY) == 3
    assert 0 < await store.client.ttl(WORKER_STARTS_KEY) <= WORKER_STARTS_SECONDS


async def test_the_workers_of_a_host_that_start_once_are_not_one_that_starts_often(store: Store) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(beating(store))
        await wait_until(lambda: store.client.zcard(WORKER_STARTS_KEY), holds=lambda starts: starts == 4)
        assert await count_starts(store) == 1


async def test_a_heartbeat_begins_soon_after_a_fault_of_redis() -> None:
    with RedisServer("valkey") as server:
        server.kill()
        async with opened(server.url) as store, beating(store, 60) as task:
            await asyncio.sleep(0.2)
            assert not task.done()
            server.start()
            await wait_until(lambda: store.client.exists(key(1)))
