"""`capsule serve --check` and `capsule worker --check`: the health checks of containers."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from capsule_gateway.cli import processes
from tests.fakes.server import HANG, FakeServer, answer
from tests.support.command_line import Run, Tool, run_process
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, free_port
from tests.support.worker_process import Worker
from workers import __main__ as workers

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer() as server:
        yield server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer("valkey") as server:
        yield server


async def test_the_names_are_those_of_the_workers() -> None:
    assert list(processes.WORKERS) == list(workers.WORKERS)


# -- serve ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_gateway_that_is_ready(offline: Tool, gw: Gateway, host: str) -> None:
    run = await offline("serve", "--check", "--host", host, "--port", str(gw.port))
    assert run.line == f"http://127.0.0.1:{gw.port}/ready answered 200"


async def test_a_gateway_that_is_not_ready(offline: Tool, server: FakeServer) -> None:
    error = {"code": "BACKBONE_UNAVAILABLE", "message": "Redis is away.", "requestId": "abc"}
    server.reply = answer(503, {"error": error})
    message = await offline.refused("serve", "--check", "--port", str(server.port))
    assert message == f"{server.address}/ready answered 503: Redis is away."
    server.reply = answer(502, b"<html>")
    assert (await offline.refused("serve", "--check", "--port", str(server.port))).endswith("answered 502")


async def test_a_gateway_that_does_not_answer(
    offline: Tool, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "READY_SECONDS", 0.2)
    server.reply = [HANG]
    assert "does not answer" in await offline.refused("serve", "--check", "--port", str(server.port))
    assert "does not answer" in await offline.refused("serve", "--check", "--port", str(free_port()))


# -- worker --------------------------------------------------------------------------------------------------


async def check(offline: Tool, redis_url: str, *names: str, **settings: str) -> Run:
    return await offline("worker", "--check", *names, GATEWAY_REDIS_URL=redis_url, **settings)


async def test_workers_with_a_heartbeat(offline: Tool, redis: RedisServer, tmp_path: Path) -> None:
    async with Worker(redis.url, tmp_path, "webhooks", "monitors"):

        async def healthy() -> bool:
            return (await check(offline, redis.url, "webhooks", "monitors")).code == 0

        await wait_until(healthy, 10)
        run = await check(offline, redis.url, "webhooks", "monitors")
        assert run.line == "running: webhooks, monitors"

        run = await check(offline, redis.url)
        assert (run.code, run.out) == (1, "")
        assert run.err.startswith("capsule: no deploys worker on ")
        assert run.err.endswith(" has a heartbeat\n")
        run = await check(offline, redis.url, GATEWAY_DEPLOY_ENGINE="external")
        assert run.line == "running: webhooks, deploys, monitors"


async def test_a_worker_without_redis_is_found_within_seconds(offline: Tool, redis: RedisServer) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    assert "Redis cannot be read" in (await check(offline, nowhere, "monitors")).err
    redis.freeze()
    try:
        began = time.monotonic()
        run = await check(offline, redis.url, "webhooks")
        assert time.monotonic() - began < 10
    finally:
        redis.thaw()
    assert run.code == 1
    assert "Redis cannot be read" in run.err


async def test_sites_are_checked_without_redis(offline: Tool, server: FakeServer, tmp_path: Path) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    run = await check(offline, nowhere, "sites", GATEWAY_DATA_DIR=str(tmp_path))
    assert "no sites worker has served" in run.err
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "address").write_text(f"http://127.0.0.1:{server.port}")
    assert (await check(offline, nowhere, "sites", GATEWAY_DATA_DIR=str(tmp_path))).line == "running: sites"
    closed = f"127.0.0.1:{free_port()}"
    (tmp_path / "web" / "address").write_text(f"https://{closed}")
    run = await check(offline, nowhere, "sites", GATEWAY_DATA_DIR=str(tmp_path))
    assert run.err.endswith(f"does not answer at {closed}\n")


async def test_settings_that_are_wrong(offline: Tool) -> None:
    offline.environment["GATEWAY_REDIS_URL"] = "ftp://localhost"
    run = await asyncio.to_thread(run_process, offline, "worker", "--check")
    assert run.returncode == 1
    assert run.stderr.startswith("capsule: the settings are invalid:\nGATEWAY_REDIS_URL: ")
