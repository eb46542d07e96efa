from collections.abc import AsyncIterator

import pytest_asyncio

from gateway.outbound.client import Client
from tests.fakes import FakeAppBackend
from tests.gateway.inference.auth.verifier import Verifier


@pytest_asyncio.fixture(loop_scope="session")
async def verifier(backend: FakeAppBackend) -> AsyncIterator[Verifier]:
    """Verifies tokens of an app with the folder's backend."""
    async with Client(allow_private=True) as http:
        yield Verifier(http, backend)


@pytest_asyncio.fixture(loop_scope="session")
async def alone() -> AsyncIterator[Verifier]:
    """Verifies tokens of an app with its own backend, which the test may break."""
    async with FakeAppBackend() as backend, Client(allow_private=True) as http:
        yield Verifier(http, backend)
