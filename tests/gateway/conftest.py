"""One gateway, provider and app backend for most tests of this folder, on the session's event loop.

Each test uses its own accounts, apps and prompts. A test with other settings starts its own gateway with `launch`.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.accounts import App
from tests.support.dns_server import DnsServer
from tests.support.fixtures import folder_fixture, module_fixture, provider, resolver
from tests.support.gateway_process import Gateway, gateway, gateway_with_redis
from tests.support.visitor import Visitor

__all__ = ["provider", "resolver"]

Launch = Callable[..., AbstractAsyncContextManager[Gateway]]

COUNTED_SOON = {"gateway.telemetry.counters.FLUSH_SECONDS": 0.3}


@folder_fixture
async def backend() -> AsyncIterator[FakeAppBackend]:
    async with FakeAppBackend("ES256", "RS256", "EdDSA") as backend:
        yield backend


@folder_fixture
async def gw(
    provider: FakeProvider, resolver: DnsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    async with gateway_with_redis(provider, folder, COUNTED_SOON, GATEWAY_DNS=resolver.address) as running:
        yield running


@folder_fixture
async def twin(gw: Gateway, provider: FakeProvider, resolver: DnsServer) -> AsyncIterator[Gateway]:
    """A second process on the same Redis."""
    async with gateway(gw.redis.url, provider, gw.folder, COUNTED_SOON, GATEWAY_DNS=resolver.address) as running:
        yield running


@module_fixture
async def low_caps(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway with daily caps of 0.0012 EUR for the free plan and 0.000001 EUR for the starter plan."""
    caps = "free=0.0012,starter=0.000001,maker=2,max=10"
    folder = tmp_path_factory.mktemp("low_caps")
    async with gateway_with_redis(provider, folder, COUNTED_SOON, GATEWAY_DAILY_CAPS=caps) as running:
        yield running


@pytest.fixture
def launch(provider: FakeProvider, tmp_path: Path) -> Launch:
    """Starts a gateway with its own Redis: `async with launch(GATEWAY_X="…") as gw:`."""
    return partial(gateway_with_redis, provider, tmp_path)


@pytest_asyncio.fixture(loop_scope="session")
async def app(gw: Gateway, backend: FakeAppBackend) -> App:
    """A new app of a new account on the largest plan."""
    return await gw.app(backend)


@pytest_asyncio.fixture(loop_scope="session")
async def visitor(gw: Gateway) -> AsyncIterator[Visitor]:
    visitor = Visitor(gw)
    yield visitor
    await visitor.http.aclose()


@folder_fixture
async def building(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway whose deploys the test builds, as an external engine."""
    folder = tmp_path_factory.mktemp("building")
    async with gateway_with_redis(provider, folder, GATEWAY_DEPLOY_ENGINE="external") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def hosted(building: Gateway, backend: FakeAppBackend) -> App:
    """A new app whose deploys the test builds."""
    return await building.app(backend)
