"""`capsule mcp`: the proxy for agents over standard input and output, and how it ends.

tests/gateway/mcp has its tools, at a real gateway.
"""

import asyncio
import json
import os
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes.server import CLOSE, Exchange, FakeServer, Script, answer
from tests.support.command_line import Tool
from tests.support.redis_servers import free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")

ABOUT = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
PARAMS = {**ABOUT, "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


class Remote(FakeServer):
    """The endpoint of a gateway, which may be away for the calls of its tool."""

    is_away = False

    def script(self, exchange: Exchange) -> Script:
        tool = {"name": "service_hook", "inputSchema": {"type": "object"}}
        results: dict[str, Any] = {
            "initialize": {**ABOUT, "serverInfo": {"name": "capsule", "version": "1"}},
            "tools/list": {"tools": [tool]},
            "tools/call": {"content": [], "structuredContent": {"hooks": []}},
        }
        if self.is_away:
            return [CLOSE]
        return answer(200, {"jsonrpc": "2.0", "id": 1, "result": results[exchange.json["method"]]})


@pytest_asyncio.fixture(loop_scope="session")
async def remote() -> AsyncIterator[Remote]:
    async with Remote() as remote:
        yield remote


async def ask(process: Process, method: str, params: Any) -> Any:
    """Returns the result."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode() + b"\n")
    return json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["result"]


async def test_it_outlives_a_restart_of_the_gateway_and_ends_with_its_input(remote: Remote) -> None:
    environment = {"PATH": os.environ["PATH"], "CAPSULE_URL": remote.address, "CAPSULE_API_KEY": "csk_key"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "capsule_gateway", "mcp"]
    process = await asyncio.create_subprocess_exec(*command, env=environment, **pipes)
    assert (await ask(process, "initialize", PARAMS))["serverInfo"]["name"] == "capsule"
    call = {"name": "service_hook", "arguments": {"action": "list"}}
    assert process.stdin is not None
    process.stdin.write(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
    assert (await ask(process, "tools/call", call))["structuredContent"] == {"hooks": []}
    remote.is_away = True
    assert "the connection to" in str(await ask(process, "tools/call", call))
    remote.is_away = False
    assert (await ask(process, "tools/call", call))["structuredContent"] == {"hooks": []}
    out, err = await asyncio.wait_for(process.communicate(b""), 60)
    assert (process.returncode, out, err) == (0, b"", b"")


async def test_an_unusable_gateway_prints_one_line(remote: Remote, tmp_path: Path) -> None:
    closed = f"http://127.0.0.1:{free_port()}"
    assert f"cannot reach {closed}" in await Tool(closed, "csk_key", tmp_path).refused("mcp")
    assert "no API key" in await Tool("", "", tmp_path).refused("mcp", code=2)
    refusal = {"error": {"code": "UNAUTHORIZED", "message": "No.", "requestId": "r1"}}
    async with FakeServer() as stranger:
        address = stranger.address
        for status, body, message in (
            (401, refusal, "UNAUTHORIZED"),
            (421, {}, f"{address} is not the service's own address"),
            (200, {}, address),
            (200, b"<html>", address),
            (200, {"jsonrpc": "2.0", "result": {"a": 1}}, address),
        ):
            stranger.reply = answer(status, body)
            assert message in await Tool(address, "csk_key", tmp_path).refused("mcp")
