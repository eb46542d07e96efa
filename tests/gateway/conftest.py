"""One gateway, provider and app backend for most tests of the session, all on the session's loop.

Tests keep apart by their own accounts, apps and prompts; a test with other settings starts its own gateway
with `launch`.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.accounts import App
from tests.support.fixtures import provider, session_fixture
from tests.support.gateway_process import Gateway, gateway, gateway_with_redis

__all__ = ["provider"]

Launch = Callable[..., AbstractAsyncContextManager[Gateway]]

COUNTED_SOON = {"gateway.telemetry.counters.INTERVAL": 0.3}  # seconds


@session_fixture
async def backend() -> AsyncIterator[FakeAppBackend]:
    async with FakeAppBackend("ES256", "RS256", "EdDSA") as backend:
        yield backend


@session_fixture
async def gw(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("gateway"), COUNTED_SOON) as running:
        yield running


@session_fixture
async def twin(gw: Gateway, provider: FakeProvider) -> AsyncIterator[Gateway]:
    """A second process on the same Redis."""
    async with gateway(gw.redis.url, provider, gw.folder, COUNTED_SOON) as running:
        yield running


@session_fixture
async def penny(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Caps of 0.0012 EUR for the free plan and a millionth for the next."""
    caps = "free=0.0012,starter=0.000001,maker=2,max=10"
    folder = tmp_path_factory.mktemp("penny")
    async with gateway_with_redis(provider, folder, COUNTED_SOON, GATEWAY_DAILY_CAPS=caps) as running:
        yield running


@session_fixture
async def strict(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """As in production: private addresses and plain http are out of bounds."""
    folder = tmp_path_factory.mktemp("strict")
    async with gateway_with_redis(provider, folder, GATEWAY_ALLOW_PRIVATE_ADDRESSES="false") as running:
        yield running


@pytest.fixture
def launch(provider: FakeProvider, tmp_path: Path) -> Launch:
    """`async with launch(GATEWAY_X="…") as gw:` with a Redis of its own."""
    return partial(gateway_with_redis, provider, tmp_path)


@pytest_asyncio.fixture(loop_scope="session")
async def app(gw: Gateway, backend: FakeAppBackend) -> App:
    """An app of its own, of an account of its own, on the largest plan."""
    return await gw.app(backend)


@session_fixture
async def building(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Its deploys are built by an outside engine, which is the test."""
    folder = tmp_path_factory.mktemp("building")
    async with gateway_with_redis(provider, folder, GATEWAY_DEPLOY_ENGINE="external") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def hosted(building: Gateway, backend: FakeAppBackend) -> App:
    """An app of its own whose deploys the test builds."""
    return await building.app(backend)
