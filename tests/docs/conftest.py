"""One gateway, provider and app backend for the examples of the pages."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.accounts import Account
from tests.support.fixtures import folder_fixture, provider
from tests.support.gateway_process import Gateway, gateway_with_redis

__all__ = ["provider"]


@folder_fixture
async def backend() -> AsyncIterator[FakeAppBackend]:
    async with FakeAppBackend() as backend:
        yield backend


@folder_fixture
async def gateway(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Runs a gateway whose rate-limit window is a second long instead of a minute."""
    soon = {"gateway.inference.spend.admission.WINDOW_SECONDS": 1.0, "gateway.telemetry.counters.FLUSH_SECONDS": 0.3}
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("gateway"), soon) as running:
        yield running


@folder_fixture
async def account(gateway: Gateway) -> Account:
    return await gateway.account()
