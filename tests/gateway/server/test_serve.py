"""The processes of `serve` share their listeners and metrics, and end bodies that arrive slowly or not at all."""

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.collector import FakeCollector
from tests.fakes.provider import chunk, tokens
from tests.support.accounts import App
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import OPERATOR, Gateway, gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.raw_http import request
from tests.support.redis_servers import RedisServer
from tests.support.responses import answered, counted

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer("redis") as server:
        yield server.url


@module_fixture
async def serving(
    redis_url: str, provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A gateway with a Unix socket, where an earlier one has left a file."""
    folder = tmp_path_factory.mktemp("serving")
    with tempfile.TemporaryDirectory() as sockets:
        (socket := Path(sockets) / "gateway.sock").touch()
        async with gateway(redis_url, provider, folder, workers=2, GATEWAY_UPSTREAM=f"unix/{socket}") as running:
            yield running


async def read_metric(gw: Gateway, name: str) -> float | None:
    response = await gw.http.get("/metrics", headers={"Connection": "close"})
    found = re.search(rf"^{name} (\S+)$", response.text, re.M)
    return float(found[1]) if found else None


async def test_each_process_reports_the_requests_of_all(serving: Gateway, backend: FakeAppBackend) -> None:
    app = await serving.app(backend)
    # One connection per request, so that both processes get requests.
    without_reuse = app.headers(Connection="close")
    answers = await asyncio.gather(*(app.post({"prompt": "x"}, headers=without_reuse) for _ in range(20)))
    assert len([answered(a) for a in answers]) == 20
    assert sorted(counted(a)[1] for a in answers) == list(range(20))

    async def counts_all() -> bool:
        name = r'gateway_requests_total\{code="",format="native",status="200"\}'
        return {await read_metric(serving, name) for _ in range(6)} == {20}

    await wait_until(counts_all, 2)  # with a delay of up to a tenth of a second


async def test_a_unix_socket_for_caddy(serving: Gateway, backend: FakeAppBackend) -> None:
    await wait_until(lambda: serving.log.count("Uvicorn running on") == 1)
    path = serving.environment["GATEWAY_UPSTREAM"].removeprefix("unix/")
    app = await serving.app(backend)
    allowed = {"domain": f"{app.name}.apps.localhost"}
    transport = httpx.AsyncHTTPTransport(uds=path)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as local:
        answer = await local.post(f"/capsule/{app.name}/ai", json={"prompt": "x"}, headers=app.headers())
        assert answered(answer)
        asked = await local.get("/platform/tls/allow", params=allowed)
        forwarded = {"X-Forwarded-For": "192.0.2.1"}
        passed_on = await local.get("/platform/tls/allow", params=allowed, headers=forwarded)
        assert (asked.status_code, passed_on.status_code) == (200, 404)
    assert os.stat(path).st_mode & 0o777 == 0o666


async def test_a_hangup_drains_the_processes(
    redis_url: str, provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path
) -> None:
    """Each of them sends its queued spans at the end."""
    async with FakeCollector() as collector:
        settings = collector.settings(OTEL_BSP_SCHEDULE_DELAY="3600000", GATEWAY_DRAIN="20")
        async with gateway(redis_url, provider, tmp_path, workers=2, **settings) as gw:
            app, gate = await gw.app(backend), asyncio.Event()
            without_reuse = app.headers(Connection="close")
            answers = [await app.post({"prompt": "x"}, headers=without_reuse) for _ in range(10)]
            prompt = provider.plays(chunk("Gu"), gate, *tokens("ten", usage=(3, 2)))
            async with app.stream(prompt) as source:
                events = source.aiter_sse()
                assert (await anext(events)).json() == {"token": "Gu"}
                gw.signal(signal.SIGHUP)
                await wait_until(lambda: "gateway.draining" in gw.log)
                assert gw.code is None, "a stream is still running"
                assert not collector.exchanges
                gate.set()
                assert [event.event async for event in events][-1] == "done"
                answers.append(source.response)
            assert await wait_until(lambda: gw.code, 10, holds=lambda code: code is not None) == 0
        roots = {span.attributes.get("capsule.request_id") for span in collector.spans if not span.parent}
        assert roots == {answer.headers["X-Request-Id"] for answer in answers}


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
