"""The builders' lock, in a real Redis."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.store import keys
from gateway.store.client import Store
from tests.support.polling import wait_until
from workers.deploys import lock
from workers.deploys.lock import LIFETIME, BuilderLock


@pytest_asyncio.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store(redis_url)
    await store.client.delete(keys.BUILDER)
    yield store
    await store.client.delete(keys.BUILDER)
    await store.close()


async def test_builders_of_one_folder_share_it_and_others_wait(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RETRY_INTERVAL", 0.02)
    first, second, other = (BuilderLock(store, folder) for folder in ("folder-1", "folder-1", "folder-2"))
    await first.acquire()
    await second.acquire()
    assert 0 < await store.client.ttl(keys.BUILDER) <= LIFETIME
    waiting = asyncio.create_task(other.acquire())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await other.release()
    assert await store.client.get(keys.BUILDER) == "folder-1", "only its owner releases it"
    await first.release()
    await asyncio.wait_for(waiting, 2)
    assert await store.client.get(keys.BUILDER) == "folder-2"


async def test_it_is_extended_until_another_folder_has_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LIFETIME", 1)
    builder = BuilderLock(store, "folder-1")
    await builder.acquire()
    keeping = asyncio.create_task(builder.keep())
    await asyncio.sleep(1.2)
    assert await store.client.get(keys.BUILDER) == "folder-1"
    await store.client.set(keys.BUILDER, "folder-2")
    await wait_until(keeping.done)
    with pytest.raises(RuntimeError, match="different data folder"):
        await keeping
