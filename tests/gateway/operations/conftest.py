"""The parts of a gateway, on a Redis of their own."""

from collections.abc import AsyncIterator

import pytest_asyncio

from gateway.services import Services
from tests.support.gateway_parts import open_gateway


@pytest_asyncio.fixture
async def gateway(redis_url: str) -> AsyncIterator[Services]:
    async with open_gateway(redis_url) as gateway:
        yield gateway
