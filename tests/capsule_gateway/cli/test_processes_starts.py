"""A failed start prints one line, which names the setting or the option and says what to do."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from capsule_gateway.cli import processes
from capsule_gateway.cli.service import ServiceRefusal
from gateway.operations.layout import LAYOUT
from tests.fakes import FakeProvider
from tests.support.gateway_process import Gateway, gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, free_port
from tests.support.worker_process import Worker
from workers import __main__ as workers

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROOT = Path(__file__).parents[3]


def warnings_in(log: str) -> list[dict[str, Any]]:
    lines = [msgspec.json.decode(line) for line in log.splitlines()]
    return [line for line in lines if line["level"] not in ("debug", "info")]


async def test_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ServiceRefusal, match=f"^port {port} of 127.0.0.1 is in use: .* choose another --port$"):
            processes.check_port("127.0.0.1", port)
    processes.check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.7", "nowhere.invalid"])
async def test_a_host_of_another_machine(host: str) -> None:
    with pytest.raises(ServiceRefusal, match=f"^{host} is not an address of this machine: choose another --host$"):
        processes.check_port(host, free_port())


@pytest.mark.parametrize("names", [[], ["sites"], ["deploys", "webhooks"]])
async def test_a_data_folder_of_a_worker(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_DATA_DIR", f"{file}/data")
    assert workers.main(names) == 1
    message = f"GATEWAY_DATA_DIR: '{file}' is not a folder; give the folder to the worker's user, or set another folder"
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


async def test_workers_wait_for_redis(tmp_path: Path) -> None:
    with RedisServer("valkey") as server:
        server.kill()
        url = f"redis://:secret@127.0.0.1:{server.port}"
        async with Worker(url, tmp_path, "webhooks", "monitors", confidential={"secret"}) as worker:
            await wait_until(lambda: "redis.unavailable" in worker.log, 20)
            await asyncio.sleep(1.5)  # it retries every second
            (line,) = warnings_in(worker.log)
            assert line["reason"] == "Redis is not running"
            assert "GATEWAY_REDIS_URL" in line["action"]
            server.start()
            await worker.joined()
            assert "redis.available" in worker.log


async def test_workers_log_when_redis_is_lost(tmp_path: Path) -> None:
    """Once, and once when it is back: not only gateways do so."""
    often = {"gateway.operations.redis_health.CHECK_SECONDS": 0.2}
    with RedisServer("valkey") as server:
        async with Worker(server.url, tmp_path, constants=often) as worker:
            await worker.joined()
            server.kill()
            await wait_until(lambda: "redis.unavailable" in worker.log, 20)
            server.start()
            await wait_until(lambda: "redis.available" in worker.log, 20)
            assert worker.log.count("redis.unavailable") == 1


async def test_a_gateway_whose_clock_is_off(provider: FakeProvider, redis_url: str, tmp_path: Path) -> None:
    constants = {"gateway.operations.redis_health.MAX_SKEW_SECONDS": -1.0}  # so that any clock is
    async with gateway(redis_url, provider, tmp_path, constants) as gw:
        answer = await gw.http.get("/ready")
        assert answer.status_code == 503
        assert "The clock of this process is 0 seconds" in answer.text
        assert (await gw.http.get("/health")).status_code == 200
        await wait_until(lambda: "clock.off" in gw.log)


NEWER = f"The data are of layout 1000, and this version knows {LAYOUT}: start the newer version that wrote them, or"


@pytest.mark.parametrize("command", ["serve", "serve --workers 2", "worker webhooks", "worker", "worker --restart"])
async def test_data_of_a_newer_version(command: str, redis_url: str, tmp_path: Path) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set("layout", 1000)
        arguments = [*command.split(), *(["--port", str(free_port())] if "serve" in command else [])]
        environment = {"PATH": os.environ["PATH"], "GATEWAY_REDIS_URL": redis_url, "GATEWAY_DATA_DIR": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-m", "capsule_gateway", *arguments],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 78, run.stdout + run.stderr
        assert NEWER in run.stderr
        assert "Traceback" not in run.stderr + run.stdout
        client.delete("layout")


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_redis_that_returns_with_data_of_a_newer_version(
    processes: int, provider: FakeProvider, tmp_path: Path
) -> None:
    server, newer = RedisServer("valkey"), RedisServer("valkey").start()
    with newer.client() as client:
        client.set("layout", 1000)
        client.save()
    folder = Path(newer._scratch or "")
    gw = Gateway(server.url, provider, tmp_path)
    gw.workers = processes
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


@pytest.mark.parametrize("module", ["capsule_gateway.cli.main", "workers.__main__"])
async def test_a_python_that_is_too_old(module: str) -> None:
    code = f"import sys; sys.version, sys.version_info = '3.10.9 (main)', (3, 10, 9); import {module}"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    line = "Capsule Gateway needs Python 3.11 or newer; this is 3.10.9. Start it with a newer version.\n"
    assert (run.returncode, run.stderr) == (1, line)
