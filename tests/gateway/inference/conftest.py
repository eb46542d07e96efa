"""Admissions that reach Redis directly, and through a network with faults; a gateway that waits less than others."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from gateway.accounts.vault import Vault
from gateway.inference.auth.users import Users
from gateway.inference.spend import admission as admission_module
from gateway.redis import client as store_module
from gateway.settings import Settings
from tests.fakes import FakeProvider
from tests.gateway.inference.admissions import Books, Desk, desk
from tests.gateway.inference.key_hosts import Hosts
from tests.support.fixtures import session_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.tcp_proxy import Proxy

BRISK = {  # seconds
    "gateway.inference.auth.users.TOKEN_LIFE": 2,
    "gateway.inference.auth.key_sets.FETCH_INTERVAL": 2,
    "gateway.inference.auth.key_sets.FETCH_BUDGET": 3,
    "gateway.inference.auth.backend.CALL_BUDGET": 3,
    "gateway.outbound.backoff.LONGEST_PAUSE": 3,
}


@session_fixture
async def brisk(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """It waits less for apps' backends, and forgets sooner what they said."""
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("brisk"), BRISK) as running:
        yield running


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
def users(hosts: Hosts) -> Users:
    return Users(Settings(apps_domain="apps.example"), Vault(""), hosts)


@pytest.fixture
async def here(redis_url: str) -> AsyncIterator[Desk]:
    async with desk(redis_url) as running:
        yield running


@pytest.fixture
async def remote(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    """A gateway whose way to Redis a test can disturb, and whose patience is short."""
    monkeypatch.setattr(store_module, "ATTEMPT", 0.5)
    monkeypatch.setattr(admission_module, "IN_TIME", 0.5)
    monkeypatch.setattr(admission_module, "MARGIN", 0.2)
    monkeypatch.setattr(admission_module, "PAUSE", 0.05)
    async with desk(proxy.url) as running:
        yield running


@pytest.fixture
async def books(redis_url: str) -> AsyncIterator[Books]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield Books(client)
