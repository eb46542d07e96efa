"""Runs the scripts on each supported server and on fakeredis. Tests of many steps run on Valkey alone (`ON_VALKEY`)."""

from collections.abc import Iterator
from typing import Any

import fakeredis
import pytest

from tests.lua.deliveries import Deliveries
from tests.lua.scripts import CLOCK, Scripts
from tests.support.key_leaks import assert_no_leak
from tests.support.redis_servers import BINARIES, RedisServer


class Fake:
    def client(self) -> fakeredis.FakeRedis:
        return fakeredis.FakeRedis()


@pytest.fixture(scope="session", params=["fakeredis", *BINARIES])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer | Fake]:
    if request.param == "fakeredis":
        yield Fake()
        return
    with RedisServer(request.param) as server:
        yield server


@pytest.fixture
def client(server: RedisServer | Fake) -> Iterator[Any]:
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
