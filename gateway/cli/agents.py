"""Serves the agent tool `service_hook` over standard input and output, for `capsule mcp`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from mcp.server.mcpserver.exceptions import ToolError

from gateway.api.agents import tool_server
from gateway.cli.service import Refused, Service, path

T = TypeVar("T")


class RemoteHooks:
    """The hooks of the account whose API key the command line has. Raises ToolError."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, app: str, name: str) -> dict[str, Any]:
        address = path("account", "apps", app, "hooks")
        return await _call(lambda: self._service.fields("POST", address, {"name": name}, having="url"))

    async def list(self) -> list[dict[str, Any]]:
        return await _call(lambda: self._service.rows("/account/hooks"))

    async def revoke(self, hook_id: str) -> None:
        await _call(lambda: self._service.do("DELETE", path("account", "hooks", hook_id)))


async def _call(request: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(request)
    except Refused as refused:
        raise ToolError(refused.message) from None


def serve_stdio(service: Service) -> None:
    """Runs until standard input ends."""
    hooks = RemoteHooks(service)
    tool_server(lambda _: hooks).run("stdio")
