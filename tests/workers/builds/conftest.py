"""Deployments that the tests of a session share, because processes start slowly: one without a worker, and one with a
worker.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes import FakeProvider
from tests.fakes.receiver import FakeReceiver
from tests.support.deployment import Host, account_on, host_on, hosting
from tests.support.fixtures import folder_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.redis_servers import free_port

OFTEN = {"workers.builds.builder.TIDY_SECONDS": 0.3, "workers.engine.reconciler.TIDY_SECONDS": 0.3}
CANARY = {"GATEWAY_CANARY": "0.2"}
APPS_PORT = free_port()  # of the apps of `own`, where the gateway reaches them


@folder_fixture
async def idle(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    settings = {**CANARY, "GATEWAY_APPS_URL": f"http://{{host}}:{APPS_PORT}"}
    folder = tmp_path_factory.mktemp("idle")
    constants = {"gateway.inference.auth.key_sets.FETCH_INTERVAL_SECONDS": 0.1}  # each start of an app makes a key
    async with FakeProvider() as provider, gateway_with_redis(provider, folder, constants, **settings) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def own(idle: Gateway) -> AsyncIterator[Host]:
    """An empty deployment, whose workers the test starts."""
    try:
        async with FakeReceiver() as receiver, host_on(idle, receiver, APPS_PORT) as host:
            yield host
    finally:
        idle.empty()


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
