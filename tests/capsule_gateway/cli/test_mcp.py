"""`capsule mcp`: the proxy for agents over standard input and output, and how it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import FakeProvider
from tests.fakes.server import FakeServer, answer
from tests.support.accounts import App
from tests.support.agents import call, over_stdio, refused
from tests.support.command_line import Tool
from tests.support.gateway_process import gateway
from tests.support.redis_servers import RedisServer, free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}


async def start(app: App) -> asyncio.subprocess.Process:
    """Starts the command and waits for its first answer."""
    environment = {
        "PATH": os.environ["PATH"],
        "CAPSULE_URL": app.gateway.address,
        "CAPSULE_API_KEY": app.account.key,
    }
    command = [sys.executable, "-m", "capsule_gateway", "mcp"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, env=environment, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
    line = await asyncio.wait_for(process.stdout.readline(), 60)
    assert json.loads(line)["result"]["serverInfo"]["name"] == "capsule"
    return process


async def test_it_ends_with_its_standard_input(app: App) -> None:
    process = await start(app)
    out, err = await asyncio.wait_for(process.communicate(b""), 60)
    assert (process.returncode, out, err) == (0, b"", b"")


async def test_ctrl_c_ends_it(app: App) -> None:
    process = await start(app)
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out, err) == (-signal.SIGINT, b"", b"")


async def test_an_unusable_gateway_prints_one_line(app: App, tmp_path: Path) -> None:
    port, key = app.gateway.port, app.account.key
    for url, api_key, message in (
        (f"http://127.0.0.1:{free_port()}", key, "cannot reach http://127.0.0.1:"),
        (app.gateway.address, "csk_wrong", "UNAUTHORIZED"),
        (f"http://localhost:{port}", key, f"http://localhost:{port} is not the service's own address"),
    ):
        assert message in await Tool(url, api_key, tmp_path).refused("mcp")
    assert "no API key" in await Tool("", "", tmp_path).refused("mcp", code=2)


@pytest.mark.parametrize(
    "body", [{}, [], b"<html>", {"jsonrpc": "2.0", "error": {"message": "no"}}, {"jsonrpc": "2.0", "result": {"a": 1}}]
)
async def test_another_service_prints_one_line(body: object, tmp_path: Path) -> None:
    async with FakeServer() as stranger:
        stranger.reply = answer(200, body)
        assert stranger.address in await Tool(stranger.address, "csk_key", tmp_path).refused("mcp")


async def test_a_gateway_that_restarts(valkey: RedisServer, provider: FakeProvider, tmp_path: Path) -> None:
    async with gateway(valkey.url, provider, tmp_path) as first:
        account = await first.account()
        async with over_stdio(first.address, account.key) as client:
            assert await call(client, "service_hook", action="list") == {"hooks": []}
            first.kill()
            assert "cannot reach" in await refused(client, "service_hook", action="list")
            await first.start()
            assert await call(client, "service_hook", action="list") == {"hooks": []}
