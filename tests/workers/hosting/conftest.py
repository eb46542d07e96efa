"""A data folder of its own for each test, and the watchdog of its apps."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.support.folders import passable_folder
from tests.support.hosted_apps import Hosting
from tests.support.watched_apps import Watch, watching


@pytest.fixture
def hosting() -> Iterator[Hosting]:
    with passable_folder() as folder:
        yield Hosting(folder)


@pytest_asyncio.fixture
async def watch(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watch]:
    async with watching(watch := Watch(hosting), monkeypatch):
        yield watch
