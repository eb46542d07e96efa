from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.inference.auth import backend as backend_module
from gateway.inference.auth import key_sets
from gateway.outbound.client import Client
from tests.fakes import FakeAppBackend
from tests.gateway.inference.auth.verifier import Verifier


@pytest_asyncio.fixture(loop_scope="session")
async def verifier(backend: FakeAppBackend) -> AsyncIterator[Verifier]:
    """Verifies tokens of an app with the folder's backend."""
    async with Client(allow_private=True) as http:
        yield Verifier(http, backend)


@pytest_asyncio.fixture(loop_scope="session")
async def alone(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Verifier]:
    """Verifies tokens of an app with its own backend, which the test may break, and waits half a second for it."""
    monkeypatch.setattr(key_sets, "FETCH_SECONDS", 0.5)
    monkeypatch.setattr(backend_module, "CALL_SECONDS", 0.5)
    async with FakeAppBackend() as backend, Client(allow_private=True) as http:
        yield Verifier(http, backend)
