"""One gateway process for each test, with limits on requests that are out of the way: attacks test the others."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.fakes import FakeAppBackend
from tests.gateway.conftest import Launch, backend, launch, provider  # noqa: F401
from tests.hostile.bystander import FULL
from tests.support.accounts import App

SETTINGS = {
    "GATEWAY_RATE_LIMITS": "app=1000000,user=1000000",
    "GATEWAY_DAILY_CAPS": "free=1000000,starter=1000000,maker=1000000,max=1000000",
    "GATEWAY_LOG_LEVEL": "info",
    "GATEWAY_PROVIDER_CONCURRENCY": "0",
}
# Attacks last longer than an honest client has to wait, so the tests shorten the times that end them.
CONSTANTS = {"gateway.server.STALL_SECONDS": 15.0 if FULL else 8.0}


@pytest_asyncio.fixture(loop_scope="session")
async def honest(launch: Launch, backend: FakeAppBackend) -> AsyncIterator[App]:  # noqa: F811
    """The app of the bystander. The gateway has nothing else to do yet."""
    async with launch(CONSTANTS, **SETTINGS) as gateway:
        yield await gateway.app(backend)
