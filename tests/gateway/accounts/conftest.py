"""Registries of two processes on one Redis."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from gateway.accounts.registry import Registry
from tests.support.registries import process


@pytest.fixture
async def local(redis_url: str) -> AsyncIterator[Registry]:
    async with process(redis_url) as registry:
        yield registry


@pytest.fixture
async def peer(redis_url: str) -> AsyncIterator[Registry]:
    async with process(redis_url) as registry:
        yield registry


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client
