"""The number of connections that a process accepts, evictions, and the limit on descriptors."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.server import connections
from gateway.server.connections import ConnectionLimit
from gateway.server.protocol import ConnectionTimes
from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.gateway_process import gateway
from tests.support.http_site import GET, HANG, Site, serving
from tests.support.polling import wait_until
from tests.support.processes import limit_descriptors
from tests.support.redis_servers import RedisServer
from tests.support.responses import answered

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def port(times: ConnectionTimes) -> AsyncIterator[int]:
    async with serving(Site(), times, limit=ConnectionLimit(40)) as port:
        yield port


@contextlib.asynccontextmanager
async def opened(port: int, number: int, opening: bytes) -> AsyncIterator[list[Connection]]:
    clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
    for _, writer in clients:
        writer.write(opening)
    try:
        yield clients
    finally:
        for _, writer in clients:
            writer.close()


async def ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    try:
        return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "opening",
    [b"", b"GET / HTTP/1.1\r\nx: ", GET, b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx"],
    ids=["silent", "in a head", "idle", "in a body"],
)
async def test_connections_with_an_incomplete_request_are_evicted(port: int, opening: bytes) -> None:
    async with opened(port, 100, opening):
        for _ in range(60):
            assert (await ask(port)).startswith(b"HTTP/1.1 200 ")
            assert len(connections.CONNECTIONS) <= 40


async def test_a_process_with_only_busy_connections_refuses_new_ones_at_once(port: int) -> None:
    async with opened(port, 40, HANG):
        await wait_until(lambda: sum(c.is_answering() for c in connections.CONNECTIONS) == 40)
        for _ in range(20):
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                refused = await ask(port)
                assert refused.startswith(b"HTTP/1.1 503 ")
                assert b"\r\nx-request-id: " in refused
        assert len(connections.CONNECTIONS) == 40
    await wait_until(lambda: not connections.CONNECTIONS)
    assert (await ask(port)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("descriptors", "most"),
    [(256, 96), (1024, 384), (20_000, 9_744), (65_536, 32_512), (10**6, 32_512), (resource.RLIM_INFINITY, 32_512)],
)
def test_each_connection_has_a_descriptor_for_the_provider(descriptors: int, most: int) -> None:
    assert connections.max_connections(descriptors) == most


# -- the process ---------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="session")
async def test_clients_leave_descriptors_for_the_provider(
    provider: FakeProvider, backend: FakeAppBackend, valkey: RedisServer, tmp_path: Path
) -> None:
    """Even if clients open as many connections as possible, requests reach the provider."""
    async with gateway(valkey.url, provider, tmp_path, prefix=limit_descriptors("-n 256")) as gw:
        app = await gw.app(backend)
        async with opened(gw.port, 400, b"POST /register HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx"):
            assert gw.descriptors < 200
            headers = app.headers(Connection="close")
            answers = await asyncio.gather(*(app.post({"prompt": "x"}, headers=headers) for _ in range(10)))
            assert len([answered(a) for a in answers]) == 10
        capabilities = await app.account.get("/capabilities")
        assert capabilities.json()["managedInferenceStatus"] == "operational"
