"""Admissions that reach Redis directly, and through a network with faults."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from gateway.inference import admission as admission_module
from gateway.store import client as store_module
from tests.gateway.inference.admissions import Books, Desk, desk
from tests.support.tcp_proxy import Proxy


@pytest.fixture
async def here(redis_url: str) -> AsyncIterator[Desk]:
    async with desk(redis_url) as running:
        yield running


@pytest.fixture
async def remote(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    """A gateway whose way to Redis a test can disturb, and whose patience is short."""
    monkeypatch.setattr(store_module, "ATTEMPT", 0.5)
    monkeypatch.setattr(admission_module, "IN_TIME", 0.5)
    async with desk(proxy.url) as running:
        yield running


@pytest.fixture
async def books(redis_url: str) -> AsyncIterator[Books]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield Books(client)
