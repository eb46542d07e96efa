"""A queue of events on a Redis of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.support.worker_process import Queue, queue


@pytest_asyncio.fixture(loop_scope="session")
async def own(tmp_path: Path) -> AsyncIterator[Queue]:
    """A queue without a worker."""
    async with queue(tmp_path) as running:
        yield running
