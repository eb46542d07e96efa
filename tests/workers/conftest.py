"""Servers for the tests of the webhooks' parts."""

import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.receiver import FakeReceiver, certificate
from tests.support.sandbox import WAYS, Room, room_of


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, str]:
    """A server's context for receiver.example.com and 127.0.0.1, and the file to trust it with."""
    return certificate(tmp_path_factory.mktemp("tls"), "receiver.example.com", address="127.0.0.1")


@pytest.fixture(scope="session")
def bad_tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, str]:
    """For the same names, but expired; and nobody trusts it."""
    folder: Path = tmp_path_factory.mktemp("bad-tls")
    return certificate(folder, "receiver.example.com", expired=True, address="127.0.0.1")


@pytest_asyncio.fixture(loop_scope="session")
async def receiver() -> AsyncIterator[FakeReceiver]:
    async with FakeReceiver() as receiver:
        yield receiver


@pytest.fixture
def room() -> Iterator[Room]:
    with room_of() as room:
        yield room


@pytest.fixture(params=WAYS)
def each_room(request: pytest.FixtureRequest) -> Iterator[Room]:
    """With Landlock (and a user, where there is one), and with a user alone."""
    with room_of(landlock=request.param == "Landlock") as room:
        yield room
