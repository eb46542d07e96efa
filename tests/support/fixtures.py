"""What the conftests of several folders share. Each that imports a fixture has an instance of its own."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.fakes import FakeProvider

session_fixture = pytest_asyncio.fixture(scope="session", loop_scope="session")


@session_fixture
async def provider() -> AsyncIterator[FakeProvider]:
    async with FakeProvider() as provider:
        yield provider
