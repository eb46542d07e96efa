"""Deployments that the tests of a session share, because processes start slowly: one without a worker, and one with a
worker.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes import FakeProvider
from tests.support.deployment import Host, account_on, host_on, hosting
from tests.support.fixtures import folder_fixture
from tests.support.redis_servers import free_port

OFTEN = {"workers.builds.builder.TIDY_SECONDS": 0.3, "workers.engine.reconciler.TIDY_SECONDS": 0.3}
CANARY = {"GATEWAY_CANARY": "0.2"}


@folder_fixture
async def idle(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    async with FakeProvider() as provider, hosting(provider, tmp_path_factory.mktemp("idle"), **CANARY) as host:
        yield host


@pytest_asyncio.fixture(loop_scope="session")
async def own(idle: Host) -> AsyncIterator[Host]:
    """An empty deployment, whose workers the test starts."""
    try:
        async with host_on(idle.gateway, idle.receiver, free_port()) as host:
            yield host
    finally:
        idle.gateway.empty()


@folder_fixture
async def busy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    async with FakeProvider() as provider, hosting(provider, tmp_path_factory.mktemp("busy"), **CANARY) as host:
        await host.worker("deploys", "webhooks", constants=OFTEN)
        yield host


@pytest_asyncio.fixture(loop_scope="session")
async def host(busy: Host) -> AsyncIterator[Host]:
    """A new account on the deployment with a worker."""
    async with account_on(busy) as host:
        yield host
