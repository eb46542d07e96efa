"""The builders' lock, in a real Redis."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.keys import BUILDER_KEY
from gateway.redis.client import COMMAND_SECONDS, Store
from tests.support.polling import wait_until
from tests.support.tcp_proxy import Proxy
from workers.builds import lock
from workers.builds.lock import LIFETIME_SECONDS, BuilderLock


@pytest.fixture(autouse=True)
async def no_lock(store: Store) -> AsyncIterator[None]:
    yield
    await store.client.delete(BUILDER_KEY)


async def test_builders_with_the_same_folder_share_the_lock_and_others_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "RETRY_SECONDS", 0.02)
    first, second, other = (BuilderLock(store, folder) for folder in ("folder-1", "folder-1", "folder-2"))
    await first.acquire()
    await second.acquire()
    assert 0 < await store.client.ttl(BUILDER_KEY) <= LIFETIME_SECONDS
    waiting = asyncio.create_task(other.acquire())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert await store.client.get(BUILDER_KEY) == "folder-1"
    await store.client.delete(BUILDER_KEY)  # an operator deletes it
    await asyncio.wait_for(waiting, 2)
    assert await store.client.get(BUILDER_KEY) == "folder-2"


async def test_the_lock_is_extended_until_another_folder_has_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LIFETIME_SECONDS", 1)
    monkeypatch.setattr(lock, "EXTEND_SECONDS", 0.2)
    builder = BuilderLock(store, "folder-1")
    await builder.acquire()
    keeping = asyncio.create_task(builder.keep_extending())
    await asyncio.sleep(1.2)
    assert await store.client.get(BUILDER_KEY) == "folder-1"
    await store.client.set(BUILDER_KEY, "folder-2")
    await wait_until(keeping.done)
    with pytest.raises(RuntimeError, match="different data folder"):
        await keeping


async def test_a_stalled_redis_does_not_hand_over_the_lock(
    store: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is cut off while a builder with another folder stands by. The record outlives days of this."""
    monkeypatch.setattr(lock, "EXTEND_SECONDS", 0.05)
    monkeypatch.setattr(lock, "RETRY_SECONDS", 0.05)
    through_proxy = Store(proxy.url)
    owner, other = BuilderLock(through_proxy, "folder-1"), BuilderLock(store, "folder-2")
    await owner.acquire()
    keeping, waiting = asyncio.create_task(owner.keep_extending()), asyncio.create_task(other.acquire())
    proxy.swallowing = True
    await asyncio.sleep(1.2 * COMMAND_SECONDS)  # an attempt to extend it fails
    assert await store.client.ttl(BUILDER_KEY) > 86_400
    assert not waiting.done()
    proxy.swallowing = False
    proxy.cut()
    await store.client.expire(BUILDER_KEY, 86_400)
    await wait_until(lambda: _is_extended(store))
    assert not keeping.done()
    assert not waiting.done()
    assert await store.client.get(BUILDER_KEY) == "folder-1"
    for task in (keeping, waiting):
        task.cancel()
    await asyncio.gather(keeping, waiting, return_exceptions=True)
    await through_proxy.close()


async def _is_extended(store: Store) -> bool:
    return bool(await store.client.ttl(BUILDER_KEY) > LIFETIME_SECONDS - 60)
