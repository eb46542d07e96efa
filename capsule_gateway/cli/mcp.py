"""Serves the agent tools over standard input and output, for `capsule mcp`: a proxy to the gateway's `/mcp`.

The MCP SDK speaks to the client. Each `tools/list` and `tools/call` becomes one POST to `/mcp`. That endpoint keeps no
sessions, so the gateway may restart between two calls.

Failure policy: if the gateway is away or refuses the key at the start, the command ends with one line. Later, a failed
call is a tool error with the same text, and the next call tries again.
"""

import asyncio
import signal
from importlib.metadata import version
from typing import Any, TypeVar

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INTERNAL_ERROR,
    CallToolRequestParams,
    CallToolResult,
    InitializeResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
)
from mcp.types.version import LATEST_HANDSHAKE_VERSION
from pydantic import BaseModel, ValidationError

from capsule_gateway.cli.service import Service, ServiceRefusal

# At this version, each call is a request of its own: the gateway needs no handshake and no session.
HEADERS = {"accept": "application/json, text/event-stream", "mcp-protocol-version": LATEST_HANDSHAKE_VERSION}
MISDIRECTED = 421

Result = TypeVar("Result", bound=BaseModel)


class RemoteTools:
    """The tools at the gateway's `/mcp`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def initialize(self) -> InitializeResult:
        """Returns the gateway's description of its MCP server. Raises ServiceRefusal."""
        about = {"name": "capsule", "version": version("capsule-gateway")}
        params = {"protocolVersion": LATEST_HANDSHAKE_VERSION, "capabilities": {}, "clientInfo": about}
        return self._request("initialize", params, InitializeResult)

    async def list_tools(self, _context: Any, _params: PaginatedRequestParams | None) -> ListToolsResult:
        try:
            return await asyncio.to_thread(self._request, "tools/list", {}, ListToolsResult)
        except ServiceRefusal as refused:
            raise MCPError(INTERNAL_ERROR, refused.message) from None

    async def call_tool(self, _context: Any, params: CallToolRequestParams) -> CallToolResult:
        call = {"name": params.name, "arguments": params.arguments or {}}
        try:
            return await asyncio.to_thread(self._request, "tools/call", call, CallToolResult)
        except ServiceRefusal as refused:
            return CallToolResult(content=[TextContent(text=refused.message)], is_error=True)

    def _request(self, method: str, params: dict[str, Any], result: type[Result]) -> Result:
        """Sends a JSON-RPC request and returns its result. Raises ServiceRefusal."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        try:
            answer = self._service.request_object("POST", "/mcp", body, having="jsonrpc", headers=HEADERS)
        except ServiceRefusal as refused:
            if refused.status != MISDIRECTED:
                raise
            raise ServiceRefusal(
                f"{self._service.url} is not the service's own address; use that of GATEWAY_BASE_URL"
            ) from None
        try:
            return result.model_validate(answer.get("result"))
        except ValidationError:
            raise ServiceRefusal(f"{self._service.url} did not answer {method}: {answer.get('error')}") from None


async def serve_stdio(service: Service) -> None:
    """Serves until standard input ends. Raises ServiceRefusal if the gateway cannot be used."""
    tools = RemoteTools(service)
    gateway = tools.initialize()
    about = gateway.server_info
    server = Server(
        about.name,
        title=about.title,
        version=about.version,
        instructions=gateway.instructions,
        on_list_tools=tools.list_tools,
        on_call_tool=tools.call_tool,
    )
    # The SDK reads standard input in a thread that cannot be canceled, so Ctrl-C must end the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())
