from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes.receiver import FakeReceiver
from tests.support.gateway_process import Gateway
from tests.support.webhook_holder import Holder
from tests.support.worker_process import Worker


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def receiver() -> AsyncIterator[FakeReceiver]:
    async with FakeReceiver() as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def worker(gw: Gateway, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    constants = {"workers.webhooks.sender.BUDGET_SECONDS": 2}
    async with Worker(gw.redis.url, tmp_path_factory.mktemp("worker"), constants=constants) as worker:
        yield worker


@pytest_asyncio.fixture(loop_scope="session")
async def holder(gw: Gateway, receiver: FakeReceiver) -> Holder:
    return Holder(await gw.account(), receiver)
