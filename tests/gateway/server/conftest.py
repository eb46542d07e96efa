"""A site, and the port of its server in this process. A test may have other `times`."""

from collections.abc import AsyncIterator

import pytest

from gateway.server.protocol import ConnectionTimes
from tests.support.http_site import Site, serving


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def times() -> ConnectionTimes:
    return ConnectionTimes()


@pytest.fixture
async def port(site: Site, times: ConnectionTimes) -> AsyncIterator[int]:
    async with serving(site, times, sweep=0.05) as port:
        yield port
