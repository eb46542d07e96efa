"""Runs the scripts on every supported server and on fakeredis."""

import os
from collections.abc import Iterator
from typing import Any

import fakeredis
import pytest
from hypothesis import settings

from tests.lua.deliveries import Deliveries
from tests.lua.scripts import CLOCK, Scripts
from tests.support.key_leaks import unexplained
from tests.support.redis_servers import BINARIES, RedisServer

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(scope="session", params=["fakeredis", *BINARIES])
def any_server(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yields a client of an empty server that the tests of this folder share."""
    if request.param == "fakeredis":
        yield fakeredis.FakeRedis()
        return
    server = RedisServer(request.param).start()
    with server.client() as client:
        yield client
    server.stop()


@pytest.fixture
def client(any_server: Any) -> Iterator[Any]:
    any_server.flushall()
    yield any_server
    any_server.delete(CLOCK)
    leaked = unexplained(any_server)
    assert not leaked, f"keys without expiry or reason: {leaked}"


@pytest.fixture
def scripts(client: Any) -> Scripts:
    return Scripts(client)


@pytest.fixture
def deliveries(client: Any) -> Deliveries:
    return Deliveries(client)
