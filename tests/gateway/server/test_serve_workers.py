"""The listeners of `serve`, which several processes share. These tests use Redis instead of Valkey."""

import asyncio
import os
import re
import signal
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import chunk, tokens
from tests.support.gateway_process import gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.responses import answered, counted

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_two_workers(provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path) -> None:
    with RedisServer("redis") as server:
        async with gateway(server.url, provider, tmp_path, workers=2) as gw:
            app = await gw.app(backend)
            # One connection per request, so that both processes get requests.
            without_reuse = app.headers(Connection="close")
            answers = await asyncio.gather(*(app.post({"prompt": "x"}, headers=without_reuse) for _ in range(20)))
            assert len([answered(a) for a in answers]) == 20
            assert sorted(counted(a)[1] for a in answers) == list(range(20))

            async def metrics() -> float:
                response = await gw.http.get("/metrics", headers={"Connection": "close"})
                lines = re.findall(r'^(\w+_total\{.*code="OK".*\}|\w*requests_total\{.*\}) (\S+)$', response.text, re.M)
                return max(float(value) for _, value in lines)

            async def counts_all() -> bool:
                return min([await metrics() for _ in range(6)]) >= 20

            # Each process reports the requests of both, with a delay of up to a tenth of a second.
            await wait_until(counts_all, 2)
            assert await gw.stop() in (0, -signal.SIGTERM)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_unix_socket_for_caddy(
    provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path, workers: int
) -> None:
    with RedisServer("redis") as server, tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/gateway.sock"
        Path(path).touch()  # left by an earlier gateway
        settings = {"GATEWAY_UPSTREAM": f"unix/{path}"}
        async with gateway(server.url, provider, tmp_path, workers=workers, **settings) as gw:
            app = await gw.app(backend)
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
            assert await gw.stop() in (0, -signal.SIGTERM)


async def test_a_hangup_drains_the_processes(provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path) -> None:
    with RedisServer("redis") as server:
        async with gateway(server.url, provider, tmp_path, workers=2, GATEWAY_DRAIN="20") as gw:
            app, gate = await gw.app(backend), asyncio.Event()
            prompt = provider.plays(chunk("Gu"), gate, *tokens("ten", usage=(3, 2)))
            async with app.stream(prompt) as source:
                events = source.aiter_sse()
                assert (await anext(events)).json() == {"token": "Gu"}
                gw.signal(signal.SIGHUP)
                await wait_until(lambda: "gateway.draining" in gw.log)
                assert gw.code is None, "a stream is still running"
                gate.set()
                assert [event.event async for event in events][-1] == "done"
            assert await wait_until(lambda: gw.code, 10, holds=lambda code: code is not None) == 0
