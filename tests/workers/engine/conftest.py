"""An app on each engine, whose driver keeps the contract."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.redis.client import Store
from tests.support.engines import Engine, engine_on
from tests.support.folders import passable_folder
from tests.support.shops import Shop
from tests.support.stores import opened


@pytest.fixture(params=["host", "cluster"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def worker_redis(request: pytest.FixtureRequest, redis_url: str) -> str:
    """The URL for the worker, which is the proxy's for a test that has one."""
    url: str = request.getfixturevalue("proxy").url if "proxy" in request.fixturenames else redis_url
    return url


@pytest_asyncio.fixture
async def engine(kind: str, worker_redis: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    with passable_folder() as folder:
        async with opened(worker_redis) as own, engine_on(kind, folder, own, monkeypatch) as engine:
            yield engine


@pytest_asyncio.fixture
async def shop(engine: Engine, store: Store) -> AsyncIterator[Shop]:
    shop = Shop(engine, store)
    shop.visitors.come()
    yield shop
    await shop.visitors.leave()
