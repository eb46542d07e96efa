"""`capsule serve --check` and `capsule worker --check`: the health checks of containers."""

import time
from pathlib import Path

import pytest

from capsule_gateway.cli import processes
from gateway.keys import worker_key
from tests.capsule_gateway.cli.conftest import Service
from tests.fakes.server import HANG, answer
from tests.support.command_line import Run, Tool
from tests.support.redis_servers import RedisServer, free_port
from workers import __main__ as workers
from workers.heartbeat import worker_name

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_names_are_those_of_the_workers() -> None:
    assert list(processes.WORKERS) == list(workers.WORKERS)


# -- serve ---------------------------------------------------------------------------------------------------


async def test_a_gateway_that_is_ready_or_not(offline: Tool, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    check = ("serve", "--check", "--port", str(service.port))
    for host in ("127.0.0.1", "0.0.0.0"):
        assert (await offline(*check, "--host", host)).line == f"{service.address}/ready answered 200"
    assert service.calls == ["GET /ready"] * 2
    error = {"code": "BACKBONE_UNAVAILABLE", "message": "Redis is away.", "requestId": "abc"}
    service.replies = [answer(503, {"error": error})]
    assert await offline.refused(*check) == f"{service.address}/ready answered 503: Redis is away."
    service.replies = [answer(502, b"<html>")]
    assert (await offline.refused(*check)).endswith("answered 502")
    monkeypatch.setattr(processes, "READY_SECONDS", 0.2)
    service.replies = [[HANG]]
    assert "does not answer" in await offline.refused(*check)
    assert "does not answer" in await offline.refused(*check[:3], str(free_port()))


# -- worker --------------------------------------------------------------------------------------------------


async def check(offline: Tool, redis_url: str, *names: str, **settings: str) -> Run:
    return await offline("worker", "--check", *names, GATEWAY_REDIS_URL=redis_url, **settings)


async def test_workers_with_a_heartbeat(offline: Tool, redis_url: str, valkey: RedisServer) -> None:
    names = {"webhooks": worker_name(1), "monitors": worker_name(2), "deploys": "another-host-1"}
    with valkey.client() as client:
        for group, name in names.items():  # a worker that was restarted has the next number for a while
            client.set(worker_key(group, name), "token", ex=15)
    run = await check(offline, redis_url, "webhooks", "monitors")
    assert run.line == "running: webhooks, monitors"

    run = await check(offline, redis_url)
    assert (run.code, run.out) == (1, "")
    assert run.err.startswith("capsule: no deploys worker on ")
    assert run.err.endswith(" has a heartbeat\n")
    run = await check(offline, redis_url, GATEWAY_DEPLOY_ENGINE="external")
    assert run.line == "running: webhooks, deploys, monitors"


async def test_a_worker_without_redis_is_found_within_seconds(offline: Tool, valkey: RedisServer) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    assert "Redis cannot be read" in (await check(offline, nowhere, "monitors")).err
    valkey.freeze()
    try:
        began = time.monotonic()
        run = await check(offline, valkey.url, "webhooks")
        assert time.monotonic() - began < 10
    finally:
        valkey.thaw()
    assert run.code == 1
    assert "Redis cannot be read" in run.err


async def test_sites_are_checked_without_redis(offline: Tool, service: Service, tmp_path: Path) -> None:
    nowhere, closed = f"redis://127.0.0.1:{free_port()}/0", f"127.0.0.1:{free_port()}"

    async def check_sites(address: str = "") -> Run:
        if address:
            (tmp_path / "web").mkdir(exist_ok=True)
            (tmp_path / "web" / "address").write_text(address)
        return await check(offline, nowhere, "sites", GATEWAY_DATA_DIR=str(tmp_path))

    assert "no sites worker has served" in (await check_sites()).err
    assert (await check_sites(service.address)).line == "running: sites"
    assert (await check_sites(f"https://{closed}")).err.endswith(f"does not answer at {closed}\n")


async def test_settings_that_are_wrong(offline: Tool) -> None:
    run = await offline.run("worker", "--check", GATEWAY_REDIS_URL="ftp://localhost")
    assert run.code == 1
    assert run.err.startswith("capsule: the settings are invalid:\nGATEWAY_REDIS_URL: ")
