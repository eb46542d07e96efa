"""A process's registry, and a new account of the folder's gateway."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import redis.asyncio

from gateway.accounts.registry import Registry
from tests.support.accounts import Account
from tests.support.gateway_process import Gateway
from tests.support.registries import process


@pytest_asyncio.fixture(loop_scope="session")
async def account(gw: Gateway) -> Account:
    return await gw.account()


@pytest.fixture
async def local(redis_url: str) -> AsyncIterator[Registry]:
    async with process(redis_url) as registry:
        yield registry


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client
