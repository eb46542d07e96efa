"""Bodies that arrive slowly or not at all, at every kind of route with a body."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.accounts import App
from tests.support.gateway_process import OPERATOR, Gateway, gateway_with_redis
from tests.support.raw_http import request

pytestmark = pytest.mark.asyncio(loop_scope="session")
UPLOAD_SECONDS = 4.0
CONSTANTS = {
    "gateway.server.serve.BODY_SECONDS": 0.3,
    "gateway.server.protocol.UPLOAD_SECONDS": UPLOAD_SECONDS,
    "gateway.server.protocol.LEFTOVER_SECONDS": 0.3,
    "gateway.server.connections.SWEEP_SECONDS": 0.1,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def app(
    provider: FakeProvider, backend: FakeAppBackend, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[App]:
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("slow"), CONSTANTS) as gw:
        app = await gw.app(backend)
        await app.account.call("POST", "/mcp", {})  # the first call imports the SDK, which may take seconds
        yield app


# Method, path and kind of credential.
ROUTES = {
    "register": ("POST", "/register", ""),
    "dashboard": ("POST", "/dashboard/session", ""),
    "ops": ("POST", "/ops/session", ""),
    "mcp": ("POST", "/mcp", "account"),
    "webhook": ("PUT", "/account/webhook", "account"),
    "account": ("POST", "/platform/accounts", "operator"),
    "findings": ("POST", "/platform/apps/<app>/findings", "operator"),
    "source": ("PUT", "/account/apps/<app>/source", "account"),
    "operator's source": ("PUT", "/platform/apps/<app>/source", "operator"),
}


def head(app: App, name: str, length: int) -> bytes:
    method, path, whose = ROUTES[name]
    headers = [f"Content-Length: {length}", "Accept: application/json, text/event-stream"]
    if whose:
        headers.append(f"Authorization: Bearer {OPERATOR if whose == 'operator' else app.account.key}")
    asked = request(path.replace("<app>", app.name), b"", *headers, method=method)
    if "source" in name:
        asked = asked.replace(b"application/json\r\n", b"application/gzip\r\n", 1)
    return asked.replace(b"Host: gateway", f"Host: 127.0.0.1:{app.gateway.port}".encode())  # /mcp checks it


async def hold(app: App, name: str, drip: bytes, every: float = 0.1) -> tuple[float, bytes]:
    """Sends `drip` at intervals. Returns how long the connection lasted, and what was received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", app.gateway.port)
    writer.write(head(app, name, 10_000_000 if len(drip) > 1 else 60_000))
    reading = asyncio.create_task(reader.read())
    began = time.monotonic()
    while not reading.done():
        assert time.monotonic() - began < 15, "the connection is still open"
        writer.write(drip)
        await asyncio.wait([reading], timeout=every)
    writer.close()
    lasted = time.monotonic() - began
    try:
        return lasted, reading.result()
    except ConnectionError:
        return lasted, b""


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["silent", "drip"])
async def test_a_body_that_does_not_arrive(app: App, drip: bytes) -> None:
    """The connection is closed, with or without a credential."""
    ends = await asyncio.gather(*(hold(app, name, drip) for name in ROUTES))
    for name, (lasted, received) in zip(ROUTES, ends, strict=True):
        assert lasted < UPLOAD_SECONDS, name
        # A connection that is reset may lose the response.
        assert received == b"" or b" 400 " in received, (name, received)


async def test_an_upload_at_the_minimum_rate_has_a_total_limit_and_one_below_it_ends_before(app: App) -> None:
    ends = await asyncio.gather(*(hold(app, "source", b"\x1f\x8b" + b"x" * rate) for rate in (500, 8_000)))
    slow, steady = (lasted for lasted, _ in ends)
    assert slow < UPLOAD_SECONDS
    assert UPLOAD_SECONDS - 1 < steady < UPLOAD_SECONDS + 4


async def test_a_body_at_the_minimum_rate(app: App) -> None:
    """It takes longer than a small body may, but arrives steadily."""
    padding = " " * 100_000
    body = json.dumps({"name": "Slow", "plan": "free"}).encode() + padding.encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", app.gateway.port)
    writer.write(head(app, "account", len(body)))
    for start in range(0, len(body), 20_000):
        writer.write(body[start : start + 20_000])
        await asyncio.sleep(0.15)
    assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"201"
    writer.close()


async def test_a_client_that_disconnects_during_its_body_logs_no_error(app: App) -> None:
    for name in ("register", "source"):
        _, writer = await asyncio.open_connection("127.0.0.1", app.gateway.port)
        writer.write(head(app, name, 60_000) + b"{")
        await asyncio.sleep(0.1)
        writer.close()
    gw: Gateway = app.gateway
    await asyncio.sleep(0.5)
    assert "request.crashed" not in gw.log
    gw.assert_log_is_clean()
