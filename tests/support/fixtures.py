"""Fixtures shared by the conftests of several folders. Each conftest that imports one has its own instance."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.fakes import FakeProvider

session_fixture = pytest_asyncio.fixture(scope="session", loop_scope="session")


@session_fixture
async def provider() -> AsyncIterator[FakeProvider]:
    async with FakeProvider() as provider:
        yield provider
