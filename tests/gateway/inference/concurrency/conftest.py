"""Processes that share permits, on a real Redis and in virtual time."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from tests.gateway.inference.permit_processes import Processes, SimulatedRedis, real_processes
from tests.lua.leases import MESSAGES
from tests.lua.scripts import CLOCK


@pytest.fixture
async def processes(redis_url: str) -> AsyncIterator[Processes]:
    processes = real_processes(redis_url)
    yield processes
    await processes.kill_all()


@pytest.fixture
def simulated(redis_url: str) -> Iterator[SimulatedRedis]:
    """For tests in virtual time."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield SimulatedRedis(client)
        client.delete(CLOCK, MESSAGES)
