"""A gateway whose deploys an external engine builds: the test. Each test starts without data."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from gateway.redis.client import Store
from tests.fakes import FakeProvider
from tests.support.accounts import Account
from tests.support.deploys import an_app
from tests.support.fixtures import folder_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.stores import opened


@folder_fixture
async def external(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    settings = {"GATEWAY_DEPLOY_ENGINE": "external", "GATEWAY_DEPLOY_QUOTAS": "free=4"}
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("external"), **settings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def account(gw: Gateway) -> Account:
    return await gw.account()


@pytest_asyncio.fixture(loop_scope="session")
async def app(account: Account) -> str:
    """The name of a new app."""
    return await an_app(account)


@pytest_asyncio.fixture(loop_scope="session")
async def store(gw: Gateway) -> AsyncIterator[Store]:
    async with opened(gw.redis.url) as store:
        yield store


@pytest.fixture
def gw(external: Gateway) -> Iterator[Gateway]:
    try:
        yield external
    finally:
        external.empty()
