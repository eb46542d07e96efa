"""The health checks of containers; and a failed start prints one line, which says what to do."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from capsule_gateway.cli import processes
from capsule_gateway.cli.service import ServiceRefusal
from gateway.keys import worker_key
from gateway.operations.layout import LAYOUT
from tests.capsule_gateway.cli.conftest import Service
from tests.fakes import FakeProvider
from tests.fakes.server import HANG, answer
from tests.support.command_line import Run, Tool
from tests.support.gateway_process import Gateway, gateway
from tests.support.polling import wait_until
from tests.support.preloaded import launch
from tests.support.redis_servers import RedisServer, free_port
from tests.support.worker_process import Worker
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


# -- starts that fail ----------------------------------------------------------------------------------------


def warnings_in(log: str) -> list[dict[str, Any]]:
    lines = [msgspec.json.decode(line) for line in log.splitlines()]
    return [line for line in lines if line["level"] not in ("debug", "info")]


async def test_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ServiceRefusal, match=f"^port {port} of 127.0.0.1 is in use: .* choose another --port$"):
            processes.check_port("127.0.0.1", port)
    processes.check_port("127.0.0.1", port)


async def test_a_host_of_another_machine() -> None:
    for host in ("203.0.113.7", "nowhere.invalid"):
        with pytest.raises(ServiceRefusal, match=f"^{host} is not an address of this machine: choose another --host$"):
            processes.check_port(host, free_port())


async def test_a_data_folder_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_DATA_DIR", f"{file}/data")
    message = f"GATEWAY_DATA_DIR: '{file}' is not a folder; give the folder to the worker's user, or set another folder"
    for names in ([], ["sites"], ["deploys", "webhooks"]):
        assert workers.main(names) == 1
        assert capsys.readouterr().err == f"The settings are invalid:\n{message}\n"


async def test_a_gateway_that_lacks_redis_and_files(provider: FakeProvider, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = {"GATEWAY_DATA_DIR": str(tmp_path / "file"), "GATEWAY_PROVIDER_KEY_FILE": str(tmp_path / "none")}
    async with gateway(f"redis://:secret@127.0.0.1:{free_port()}", provider, tmp_path, **settings) as gw:
        gw.confidential.add("secret")
    found = {line["event"]: line["action"] for line in warnings_in(gw.log)}
    assert len(found) == len(warnings_in(gw.log))
    assert found.keys() == {"data.not_writable", "provider.no_key", "redis.unavailable"}
    for event, name in zip(sorted(found), ("DATA_DIR", "PROVIDER_KEY_FILE", "REDIS_URL"), strict=True):
        assert f"GATEWAY_{name}" in found[event]


async def test_a_gateway_whose_clock_is_off(provider: FakeProvider, redis_url: str, tmp_path: Path) -> None:
    constants = {"gateway.operations.redis_health.MAX_SKEW_SECONDS": -1.0}  # so that any clock is
    async with gateway(redis_url, provider, tmp_path, constants) as gw:
        answer = await gw.http.get("/ready")
        assert answer.status_code == 503
        assert "The clock of this process is 0 seconds" in answer.text
        assert (await gw.http.get("/health")).status_code == 200
        await wait_until(lambda: "clock.off" in gw.log)


NEWER = f"The data are of layout 1000, and this version knows {LAYOUT}: start the newer version that wrote them, or"


@pytest.mark.parametrize("command", ["serve --port 0", "worker --restart"])
async def test_data_of_a_newer_version(command: str, redis_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with redis.Redis.from_url(redis_url) as client:
        client.set("layout", 1000)
        arguments = command.replace(" 0", f" {free_port()}").split()
        environment = {"PATH": os.environ["PATH"], "GATEWAY_REDIS_URL": redis_url, "GATEWAY_DATA_DIR": str(tmp_path)}
        process = launch("capsule_gateway", arguments, {}, environment, tmp_path, log)
        assert process.wait(60) == 78, log.read_text()
        assert NEWER in log.read_text()
        assert "Traceback" not in log.read_text()
        client.delete("layout")


async def test_a_redis_that_returns_with_data_of_a_newer_version(provider: FakeProvider, tmp_path: Path) -> None:
    """Each of two processes of a gateway ends for it, and then the gateway."""
    server, newer = RedisServer("valkey"), RedisServer("valkey").start()
    with newer.client() as client:
        client.set("layout", 1000)
        client.save()
    folder = Path(newer._scratch or "")
    gw = Gateway(server.url, provider, tmp_path)
    gw.workers = 2
    worker = Worker(server.url, tmp_path, "webhooks", "sites", GATEWAY_DATA_DIR=str(tmp_path / "data"))
    try:
        await gw.start()
        await worker.start()
        assert not await gw.answers("/ready")
        server.options, server._scratch = ("--appendonly", "no"), str(folder)
        server.start()
        await wait_until(lambda: gw.code is not None and worker.code is not None, 30)
        assert (gw.code, worker.code) == (78, 78)
        assert NEWER in gw.log
        assert NEWER in worker.log
    finally:
        gw.kill()
        worker.kill()
        await gw.http.aclose()
        server.stop()
        newer.stop()
