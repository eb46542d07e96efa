"""Servers that every test may ask for, and the rule that no key is left behind without a reason."""

import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.memory import freeze_heap
from tests.fakes.receiver import FakeReceiver, certificate
from tests.support.key_leaks import unexplained
from tests.support.redis_servers import BINARIES, RedisServer
from tests.support.tcp_proxy import Proxy

TESTS = Path(__file__).parent
SLOWEST = ["workers", "browser", "hostile", "chaos"]
LONG = (  # what `make test` leaves out
    "browser/",
    "chaos/",
    "gateway/test_app_failover",
    "hostile/",
    "test_package",
    "workers/deploys/",
    "workers/sandbox/",
)

# What the tests import is large and stays: by default, the garbage collector would go through it all the time.
freeze_heap()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is long, and lets the folders whose modules take longest begin, so that all processes end together.

    These folders take turns: the ones wait most of the time, the others keep a core busy.
    """
    for item in items:
        if item.path.relative_to(TESTS).as_posix().startswith(LONG):
            item.add_marker(pytest.mark.long)
    modules = {folder: list(dict.fromkeys(i.path for i in items if _folder(i) == folder)) for folder in SLOWEST}
    turn = {module: number for found in modules.values() for number, module in enumerate(found)}
    items.sort(key=lambda item: turn.get(item.path, len(turn)))


def pytest_collection_finish() -> None:
    freeze_heap()


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


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


@pytest.fixture
async def proxy(redis_url: str, valkey: RedisServer) -> AsyncIterator[Proxy]:
    """A network to Redis with faults of the test's choice."""
    async with Proxy(valkey.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, str]:
    """A server's context for receiver.example.com and 127.0.0.1, and the file to trust it with."""
    return certificate(tmp_path_factory.mktemp("tls"), "receiver.example.com", address="127.0.0.1")


@pytest.fixture(scope="session")
def bad_tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, str]:
    """A context for the same names whose certificate has expired; nobody trusts it."""
    folder: Path = tmp_path_factory.mktemp("bad-tls")
    return certificate(folder, "receiver.example.com", expired=True, address="127.0.0.1")


@pytest_asyncio.fixture(loop_scope="session")
async def receiver() -> AsyncIterator[FakeReceiver]:
    async with FakeReceiver() as receiver:
        yield receiver
