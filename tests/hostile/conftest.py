"""One gateway process for each module, with limits on requests that are out of the way: attacks test the others."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.gateway.conftest import backend, provider  # noqa: F401
from tests.hostile.bystander import FULL, Bystander, measure
from tests.support.gateway_process import gateway_with_redis
from tests.support.priority import raised_priority

SETTINGS = {
    "GATEWAY_RATE_LIMITS": "app=1000000,user=1000000",
    "GATEWAY_DAILY_CAPS": "free=1000000,starter=1000000,maker=1000000,max=1000000",
    "GATEWAY_LOG_LEVEL": "info",
    "GATEWAY_PROVIDER_CONCURRENCY": "0",
}
# Attacks last longer than an honest client has to wait, so the tests shorten the times that end them.
CONSTANTS = {"gateway.protocol.STALL_SECONDS": 15.0 if FULL else 5.0}


@pytest.fixture(scope="module", autouse=True)
def priority() -> Iterator[None]:
    with raised_priority():
        yield


@contextlib.asynccontextmanager
async def attackable(provider: FakeProvider, backend: FakeAppBackend, folder: Path) -> AsyncIterator[Bystander]:  # noqa: F811
    async with gateway_with_redis(provider, folder, CONSTANTS, **SETTINGS) as gateway:
        app = await gateway.app(backend)
        yield Bystander(app, await measure(app))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def honest(
    provider: FakeProvider,  # noqa: F811
    backend: FakeAppBackend,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Bystander]:
    async with attackable(provider, backend, tmp_path_factory.mktemp("attacked")) as bystander:
        yield bystander
