"""Agents: the SDK's own client, over both transports, and calls of the tools."""

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

IMPORT_SECONDS = 30.0  # of the SDK, when a gateway is first called, on a machine that is busy with other tests
Connect = Callable[[str, str], AbstractAsyncContextManager[Client]]


@asynccontextmanager
async def over_stdio(address: str, key: str) -> AsyncIterator[Client]:
    environment = {"PATH": os.environ["PATH"], "CAPSULE_URL": address, "CAPSULE_API_KEY": key}
    server = StdioServerParameters(command=sys.executable, args=["-m", "capsule_gateway", "mcp"], env=environment)
    async with Client(server) as client:
        yield client


def over_http(mode: str = "auto") -> Connect:
    @asynccontextmanager
    async def connect(address: str, key: str) -> AsyncIterator[Client]:
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            httpx2.AsyncClient(headers=headers, trust_env=False, timeout=IMPORT_SECONDS) as http,
            Client(streamable_http_client(f"{address}/mcp", http_client=http), mode=mode) as client,
        ):
            yield client

    return connect


async def call(client: Client, tool: str, /, **arguments: Any) -> dict[str, Any]:
    """Returns the tool's structured answer."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    assert result.structured_content is not None
    return result.structured_content


async def refused(client: Client, tool: str, /, **arguments: Any) -> str:
    """Returns the message of a call that the tool must refuse."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result.structured_content
    (content,) = result.content
    return content.text  # type: ignore[union-attr]
