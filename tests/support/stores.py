"""Opens a store as a process does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.redis.client import Store


@asynccontextmanager
async def opened(url: str, replicas: int = 0) -> AsyncIterator[Store]:
    store = Store(url, replicas=replicas)
    try:
        yield store
    finally:
        await store.close()
