"""Admission processes that reach Redis directly or through a network with faults, and users of apps."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from gateway.accounts.vault import Vault
from gateway.inference.auth.users import UserLimits, Users
from gateway.settings import Settings
from tests.gateway.inference.admissions import BRIEF, AdmissionProcess, Books, admission_process
from tests.gateway.inference.key_hosts import Hosts
from tests.support.tcp_proxy import Proxy


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
def user_limits() -> UserLimits:
    return UserLimits()


@pytest.fixture
def users(hosts: Hosts, user_limits: UserLimits) -> Users:
    return Users(Settings(apps_domain="apps.example"), Vault(""), hosts, limits=user_limits)


@pytest.fixture
async def process(redis_url: str) -> AsyncIterator[AdmissionProcess]:
    async with admission_process(redis_url) as running:
        yield running


@pytest.fixture
def admission_options() -> dict[str, Any]:
    return {}


@pytest.fixture
async def remote(proxy: Proxy, admission_options: dict[str, Any]) -> AsyncIterator[AdmissionProcess]:
    """An admission process with short timeouts, behind a network that a test can disturb."""
    async with admission_process(proxy.url, **{**BRIEF, **admission_options}) as running:
        yield running


@pytest.fixture
async def books(redis_url: str) -> AsyncIterator[Books]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield Books(client)
