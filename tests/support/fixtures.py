"""Fixtures shared by the conftests of several folders. Each conftest that imports one has its own instance."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.fakes import FakeProvider
from tests.support.dns_server import DnsServer, dns_server

# Ends with the folder of its conftest, because processes that nobody uses any more slow down the other tests.
folder_fixture = pytest_asyncio.fixture(scope="package", loop_scope="session")
module_fixture = pytest_asyncio.fixture(scope="module", loop_scope="session")


@folder_fixture
async def provider() -> AsyncIterator[FakeProvider]:
    async with FakeProvider() as provider:
        yield provider


@folder_fixture
async def resolver() -> AsyncIterator[DnsServer]:
    """The DNS server that the gateways ask about custom domains."""
    async with dns_server() as server:
        yield server
