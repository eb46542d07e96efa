"""A fleet of apps on a Redis of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.support.monitored_apps import Fleet, fleet


@pytest_asyncio.fixture(loop_scope="session")
async def own(tmp_path: Path) -> AsyncIterator[Fleet]:
    """A fleet without a worker."""
    async with fleet(tmp_path) as running:
        yield running
