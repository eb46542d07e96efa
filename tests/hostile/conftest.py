"""What the modules share: the backend, the provider and a raised priority."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.fakes import FakeAppBackend
from tests.support.fixtures import folder_fixture, provider
from tests.support.priority import raised_priority

__all__ = ["provider"]


@folder_fixture
async def backend() -> AsyncIterator[FakeAppBackend]:
    async with FakeAppBackend() as backend:
        yield backend


@pytest.fixture(scope="module", autouse=True)
def priority() -> Iterator[None]:
    with raised_priority():
        yield
