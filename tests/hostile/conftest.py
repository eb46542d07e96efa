"""One gateway process for each module."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.hostile.bystander import Bystander, run_bystander
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


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bystander(
    provider: FakeProvider, backend: FakeAppBackend, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bystander]:
    async with run_bystander(provider, backend, tmp_path_factory.mktemp("attacked")) as bystander:
        yield bystander
