"""The processes of `serve` share their listeners and their metrics. These tests use Redis instead of Valkey."""

import asyncio
import os
import re
import resource
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.collector import FakeCollector
from tests.fakes.provider import chunk, tokens
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway
from tests.support.polling import wait_until
from tests.support.processes import limit_descriptors, list_children
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
    """A gateway with a Unix socket, where an earlier one has left a file, and the soft limit of few descriptors."""
    folder = tmp_path_factory.mktemp("serving")
    with tempfile.TemporaryDirectory() as sockets:
        (socket := Path(sockets) / "gateway.sock").touch()
        options = {"workers": 2, "prefix": limit_descriptors("-Sn 256"), "GATEWAY_UPSTREAM": f"unix/{socket}"}
        constants = {"gateway.operations.overview.GAUGES_SECONDS": 0.2}
        async with gateway(redis_url, provider, folder, constants, **options) as running:
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


def soft_limit(pid: int) -> int:
    found = re.search(r"^Max open files +(\d+)", Path(f"/proc/{pid}/limits").read_text(), re.M)
    assert found
    return int(found[1])


async def test_the_limit_of_descriptors_is_raised_in_each_process(serving: Gateway) -> None:
    """The soft limit of most systems, 1,024, allows only 500 streams."""
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65_536)

    def is_raised() -> bool:
        pids = list_children(serving.pid)  # and a tracker of resources
        return [*map(soft_limit, pids)].count(hard) >= 2

    await wait_until(is_raised)  # a process serves before the last one has started


async def test_the_gauge_of_a_disabled_provider_disappears(serving: Gateway) -> None:
    """Otherwise it would say for ever what it said last."""

    async def shows(expected: float | None) -> bool:
        return await read_metric(serving, r'gateway_provider_up\{provider="default"\}') == expected

    for enabled, expected in ((True, 1), (False, None), (True, 1)):
        await serving.platform("PUT", "providers/default", {"enabled": enabled})
        await wait_until(partial(shows, expected), 60)


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
