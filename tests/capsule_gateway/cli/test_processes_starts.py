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
from tests.support.preloaded import launch
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


async def test_workers_wait_for_redis_and_log_when_it_is_lost(tmp_path: Path) -> None:
    """Each time once, and once when it is there: not only gateways do so."""
    often = {"gateway.operations.redis_health.CHECK_SECONDS": 0.2}
    with RedisServer("valkey") as server:
        server.kill()
        url = f"redis://:secret@127.0.0.1:{server.port}"
        names = ("webhooks", "monitors")
        async with Worker(url, tmp_path, *names, confidential={"secret"}, constants=often) as worker:
            await wait_until(lambda: "redis.unavailable" in worker.log, 20)
            await asyncio.sleep(1.5)  # it retries every second
            (line,) = warnings_in(worker.log)
            assert line["reason"] == "Redis is not running"
            assert "GATEWAY_REDIS_URL" in line["action"]
            server.start()
            await worker.joined()
            await wait_until(lambda: "redis.available" in worker.log)
            server.kill()
            await wait_until(lambda: worker.log.count("redis.unavailable") == 2, 20)
            server.start()
            await wait_until(lambda: worker.log.count("redis.available") == 2, 20)
            assert worker.log.count("redis.unavailable") == 2


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


async def test_a_python_that_is_too_old() -> None:
    for module in ("capsule_gateway.cli.main", "workers.__main__"):
        code = f"import sys; sys.version, sys.version_info = '3.10.9 (main)', (3, 10, 9); import {module}"
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        line = "Capsule Gateway needs Python 3.11 or newer; this is 3.10.9. Start it with a newer version.\n"
        assert (run.returncode, run.stderr) == (1, line)
