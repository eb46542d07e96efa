"""Servers that every test may ask for, and the rule that no key is left behind without a reason."""

from collections.abc import Iterator

import pytest

from tests.support.key_leaks import unexplained
from tests.support.redis_servers import BINARIES, RedisServer


@pytest.fixture(scope="session")
def valkey() -> Iterator[RedisServer]:
    """A real Valkey for the whole session."""
    server = RedisServer("valkey").start()
    yield server
    server.stop()


@pytest.fixture(scope="session", params=BINARIES)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Every server that the scripts must run on, one after the other."""
    server = RedisServer(request.param).start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(valkey: RedisServer) -> Iterator[str]:
    """An empty database; what is left in it afterwards must expire or be listed in `tests/support/key_leaks.py`."""
    with valkey.client() as client:
        client.flushall()
        yield valkey.url
        leaked = unexplained(client)
    assert not leaked, f"keys without expiry or reason: {leaked}"


@pytest.fixture
def server_url(server: RedisServer) -> Iterator[str]:
    """`redis_url` on every kind of server."""
    with server.client() as client:
        client.flushall()
        yield server.url
        leaked = unexplained(client)
    assert not leaked, f"keys without expiry or reason: {leaked}"
