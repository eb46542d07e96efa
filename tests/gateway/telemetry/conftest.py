"""The counters of one process."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.counters import CountingProcess


@pytest_asyncio.fixture
async def local(redis_url: str) -> AsyncIterator[CountingProcess]:
    process = CountingProcess(redis_url)
    yield process
    await process.store.close()
