"""Registries of two processes on one Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis.asyncio

from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.redis import servers
from gateway.redis.client import Store
from tests.support.polling import wait_until

KEY = "k" * 32


@asynccontextmanager
async def process(url: str, subscription_url: str = "") -> AsyncIterator[Registry]:
    """A process's registry. Its subscription may go another way than its commands."""
    store = Store(url)
    store._servers = servers.parse(subscription_url or url)
    registry = Registry(store, Vault(KEY))
    following = asyncio.create_task(registry.follow_changes())
    try:
        await wait_until(lambda: registry.live)
        yield registry
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await store.close()


@pytest.fixture
async def here(redis_url: str) -> AsyncIterator[Registry]:
    async with process(redis_url) as registry:
        yield registry


@pytest.fixture
async def there(redis_url: str) -> AsyncIterator[Registry]:
    async with process(redis_url) as registry:
        yield registry


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client
