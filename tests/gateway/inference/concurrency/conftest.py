"""Processes that share permits, in virtual time."""

import random
from collections.abc import Iterator

import pytest
import redis

from tests.gateway.inference.permit_processes import SimulatedRedis
from tests.lua.leases import MESSAGES
from tests.lua.scripts import CLOCK


@pytest.fixture
def simulated(redis_url: str) -> Iterator[SimulatedRedis]:
    """For tests in virtual time."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield SimulatedRedis(client)
        client.delete(CLOCK, MESSAGES)


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(1)
