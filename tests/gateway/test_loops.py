"""Work that is repeated, and what one process at a time holds."""

import asyncio
import time

import pytest

from gateway import loops
from gateway.errors import BackboneUnavailable
from gateway.loops import every, held
from gateway.redis.client import Store
from tests.support.background import in_background
from tests.support.logs import captured
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy


async def test_rounds_go_on_after_each_failure() -> None:
    """A round without Redis is no line in the log: the next one does its work."""
    failures, done = [BackboneUnavailable(), ValueError("a bug")], asyncio.Event()

    async def work() -> None:
        if failures:
            raise failures.pop(0)
        done.set()

    with captured(loops) as lines:
        rounds = asyncio.create_task(every(0, work, "work.failed"))
        await asyncio.wait_for(done.wait(), 5)
    rounds.cancel()
    assert [line["event"] for line in lines] == ["work.failed"]


# -- one holder at a time ----------------------------------------------------------------------------------------

LOCK = "lock"


async def test_one_holder_at_a_time(redis_url: str) -> None:
    """It is renewed for as long as it is held, and the next one gets it at once."""
    holding: list[int] = []

    async def work(seconds: float) -> None:
        async with opened(redis_url) as store, held(store, LOCK, 0.6, 0.01) as lost:
            assert not holding
            holding.append(1)
            await asyncio.sleep(seconds)
            assert not lost.is_set()
            holding.remove(1)

    began = time.monotonic()
    await asyncio.gather(*(work(seconds) for seconds in (1.5, 0, 0, 0)))
    assert 1.5 <= time.monotonic() - began < 5


async def test_a_holder_that_fails_or_is_canceled_frees_the_key(store: Store) -> None:
    with pytest.raises(ValueError, match="a bug"):
        async with held(store, LOCK, 30, 0.01):
            raise ValueError("a bug")

    async def work() -> None:
        async with held(store, LOCK, 30, 0.01):
            await asyncio.Event().wait()

    async with in_background(work()):
        await wait_until(lambda: is_held(store))
    assert not await is_held(store)


async def test_a_holder_that_dies_frees_the_key_in_time(valkey: RedisServer, store: Store) -> None:
    async with Proxy(valkey.port) as proxy, opened(proxy.url) as dying, held(dying, LOCK, 1, 0.01) as lost:
        proxy.go_down()
        began = time.monotonic()
        async with held(store, LOCK, 1, 0.01):
            assert 0.3 < time.monotonic() - began < 3
            await wait_until(lost.is_set)
    assert not await is_held(store)


async def test_a_holder_notices_before_another_one_can_hold_the_key(valkey: RedisServer, store: Store) -> None:
    """Redis counts from when it gets a renewal, and the holder from when it sends one."""
    async with Proxy(valkey.port) as proxy, opened(proxy.url) as away, held(away, LOCK, 1, 0.01) as lost:
        proxy.swallowing = True
        await asyncio.wait_for(lost.wait(), 3)
        async with held(store, LOCK, 1, 0.01):
            assert lost.is_set()


async def test_a_holder_whose_key_another_one_has_leaves_it(store: Store) -> None:
    async with held(store, LOCK, 0.6, 0.01) as lost:
        await store.client.set(LOCK, "another", px=5_000)
        await asyncio.wait_for(lost.wait(), 1)
    assert await store.get(LOCK) == "another"


async def is_held(store: Store) -> bool:
    return bool(await store.client.exists(LOCK))
