"""Servers for all tests. After each test, every key left in Redis must expire, or be listed with a reason."""

import gc
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis
from hypothesis import HealthCheck, settings

from gateway.loops import freeze_heap
from gateway.redis.client import Store
from tests.fakes.receiver import FakeReceiver, certificate
from tests.support.full_hours import DAY_SECONDS, wait_past_end_of
from tests.support.guard import run_under_guard
from tests.support.key_leaks import assert_no_leak
from tests.support.redis_servers import RedisServer
from tests.support.selection import Deadline, Record, leave_out
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy

SHARED = ("workers/builds/", "browser/")  # their tests share processes, which end with the folder
SLOW = ("workers/", "docs/")
LONG = (  # tests that `make test` leaves out
    "browser/",
    "chaos/",
    "docs/test_clients",
    "docs/test_examples",
    "docs/test_identity",
    "docs/test_proxies",
    "capsule_gateway/cli/test_mcp",
    "capsule_gateway/cli/test_operators",
    "capsule_gateway/cli/test_processes",
    "capsule_gateway/dev/",
    "gateway/accounts/test_registry_processes",
    "gateway/api/test_install",
    "gateway/api/test_openapi.py::test_no_undocumented_status",
    "gateway/inference/test_handler_backbone",
    "gateway/inference/test_upstream",
    "gateway/operations/test_leaving.py::test_nothing_is_left",
    "gateway/server/test_lifespan",
    "gateway/server/test_serve",
    "gateway/server/test_supervisor",
    "gateway/test_app_cluster",
    "gateway/test_app_switchover",
    "gateway/test_log_reader",
    "hostile/",
    "ops/test_prometheus.py::test_each_alert_fires",
    "test_package",
    "workers/backup/test_run",
    "workers/builds/",
    "workers/engine/test_data",
    "workers/hosting/test_data",
    "workers/hosting/test_sites",
    "workers/hosting/test_watchdog",
    "workers/kubernetes/test_pod",
    "workers/sandbox/",
    "workers/test_main.py::test_every_worker_trusts",
    "workers/test_restarts",
    "workers/webhooks/test_sender_faults",
)

settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("tests")

# The imported modules are large and stay in memory. Without this, the garbage collector keeps scanning them.
freeze_heap()
gc.disable()  # until all are imported


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("capsule")
    group.addoption("--passed-to", metavar="FILE", help="add the names of the tests that pass to this file")
    group.addoption("--not-in", metavar="FILE", help="leave out the tests that this file names")
    group.addoption("--within", metavar="SECONDS", type=float, help="start no test later than this, and say how many")
    group.addoption("--order", metavar="NUMBER", type=int, help="shuffle the long modules by this number")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        run_under_guard()
    if config.option.passed_to and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(Path(config.option.passed_to)))
    if config.option.within is not None:
        config.pluginmanager.register(Deadline(time.monotonic() + config.option.within))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no module of which all tests are left out, because each process of `make test` collects all tests."""
    name = os.path.relpath(collection_path, Path(__file__).parent)
    return True if config.option.markexpr == "not long" and f"{name}/".startswith(LONG) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks long tests, and starts with the modules that take longest, so that all processes end together.

    What `make test` has left out for lack of a tool comes before the long tests, which may not all run in the time.
    The folders with shared processes come first, one after another. Of the other slow modules, those of different
    folders alternate, because some wait most of the time and others keep a core busy.
    """
    if config.option.not_in:
        leave_out(Path(config.option.not_in), config, items)
    slow: dict[str, dict[Path, int]] = {}  # modules in each folder, with their positions
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(LONG):
            item.add_marker(pytest.mark.long)
        if name.startswith((*LONG, *SLOW)) and not name.startswith(SHARED):
            modules = slow.setdefault(name.partition("/")[0], {})
            modules.setdefault(item.path, len(modules))
    positions = {module: position for modules in slow.values() for module, position in modules.items()}

    def order(item: pytest.Item) -> int:
        name = item.nodeid.removeprefix("tests/")
        for number, folder in enumerate(SHARED):
            if name.startswith(folder):
                return number
        return len(SHARED) + positions.get(item.path, len(positions))

    ranks = list(range(len(SHARED), len(SHARED) + len(positions) + 1))
    if config.option.order is not None:
        random.Random(config.option.order).shuffle(ranks)
    ranks = [*range(len(SHARED)), *ranks]
    items.sort(key=lambda item: ranks[order(item)])
    if config.option.not_in:
        items.sort(key=lambda item: item.get_closest_marker("long") is not None)


def pytest_collection_finish() -> None:
    gc.enable()
    freeze_heap()


def pytest_runtest_setup() -> None:
    wait_past_end_of(DAY_SECONDS)


@pytest.fixture(scope="session")
def valkey() -> Iterator[RedisServer]:
    """Runs a Valkey server for the whole session."""
    with RedisServer("valkey") as server:
        yield server


@pytest.fixture(scope="session")
def valkey_client(valkey: RedisServer) -> Iterator[redis.Redis]:
    """The client that empties the server for each test. To connect takes ten times as long."""
    with valkey.client() as client:
        yield client


@pytest.fixture
def redis_url(valkey: RedisServer, valkey_client: redis.Redis) -> Iterator[str]:
    """Yields the URL of an empty database. Keys left in it must expire or be listed in `tests/support/key_leaks.py`."""
    valkey_client.flushall()
    yield valkey.url
    assert_no_leak(valkey_client)


@pytest_asyncio.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    """A process's connections to the empty database."""
    async with opened(redis_url) as store:
        yield store


@pytest.fixture
async def proxy(redis_url: str, valkey: RedisServer) -> AsyncIterator[Proxy]:
    """Runs a proxy to Redis that injects network faults."""
    async with Proxy(valkey.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, str]:
    """Returns a server context for receiver.example.com and 127.0.0.1, and the certificate file that clients trust."""
    return certificate(tmp_path_factory.mktemp("tls"), "receiver.example.com", address="127.0.0.1")


@pytest.fixture(scope="session")
def bad_tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, str]:
    """Returns the same with an expired certificate."""
    folder: Path = tmp_path_factory.mktemp("bad-tls")
    return certificate(folder, "receiver.example.com", days=-1, address="127.0.0.1")


@pytest_asyncio.fixture(loop_scope="session")
async def receiver() -> AsyncIterator[FakeReceiver]:
    async with FakeReceiver() as receiver:
        yield receiver
