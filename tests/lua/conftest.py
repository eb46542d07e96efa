"""Runs the scripts on each supported server. Tests of many steps run on Valkey alone (`ON_VALKEY`)."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.lua.deliveries import Deliveries
from tests.lua.scripts import CLOCK, Scripts
from tests.support.key_leaks import assert_no_leak
from tests.support.redis_servers import BINARIES, RedisServer


@pytest.fixture(scope="session", params=[*BINARIES])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(request.param) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    """Yields a client of an empty server."""
    with server.client() as client:
        client.flushall()
        yield client
        client.delete(CLOCK)
        assert_no_leak(client)


@pytest.fixture
def scripts(client: Any) -> Scripts:
    return Scripts(client)


@pytest.fixture
def deliveries(client: Any) -> Deliveries:
    return Deliveries(client)
