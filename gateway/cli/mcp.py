"""Serves the agent tools over standard input and output, for `capsule mcp`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from mcp.server.mcpserver.exceptions import ToolError

from gateway.cli.service import Refused, Service, path
from gateway.mcp import deliveries, deploys
from gateway.mcp.apps import FINDINGS
from gateway.mcp.server import tool_server

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


class RemoteDeploys:
    """The deploys of the same account. Raises ToolError."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, app: str) -> list[dict[str, Any]]:
        return await _call(lambda: self._service.rows("/account/deploys", app=app or None, limit=deploys.LISTED))

    async def show(self, deploy_id: str) -> dict[str, Any]:
        return await _call(lambda: self._service.fields("GET", path("account", "deploys", deploy_id), having="state"))

    async def roll_back(self, app: str, deploy_id: str) -> str:
        address, body = path("account", "apps", app, "rollback"), {"deployId": deploy_id} if deploy_id else {}
        queued = await _call(lambda: self._service.fields("POST", address, body, having="deployId"))
        return str(queued["deployId"])

    async def cancel(self, deploy_id: str) -> dict[str, Any]:
        address = path("account", "deploys", deploy_id, "cancel")
        return await _call(lambda: self._service.fields("POST", address, having="state"))


class RemoteApps:
    """The apps of the same account. Raises ToolError."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self) -> list[dict[str, Any]]:
        return await _call(lambda: self._service.rows("/account/apps"))

    async def show(self, app: str) -> dict[str, Any]:
        at = path("account", "apps", app)
        shown = await _call(lambda: self._service.fields("GET", at))
        findings = await _call(lambda: self._service.rows(f"{at}/findings", limit=FINDINGS))
        crashes = await _call(lambda: self._service.rows(f"{at}/crashes"))
        return {**shown, "findings": findings, "crashes": crashes}


class RemoteDeliveries:
    """The deliveries of the same account. Raises ToolError."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, app: str, outcome: str) -> list[dict[str, Any]]:
        query = {"app": app or None, "outcome": outcome or None, "limit": deliveries.LISTED}
        return await _call(lambda: self._service.rows("/account/deliveries", **query))

    async def show(self, delivery_id: str) -> dict[str, Any]:
        address = path("account", "deliveries", delivery_id)
        return await _call(lambda: self._service.fields("GET", address, having="outcome"))

    async def redeliver(self, event_id: str) -> None:
        await _call(lambda: self._service.do("POST", path("account", "deliveries", event_id, "redeliver")))

    async def redeliver_failed(self, since: str) -> int:
        address, body = "/account/deliveries/redeliver", {"since": since, "outcome": "failed"}
        queued = await _call(lambda: self._service.fields("POST", address, body, having="count"))
        return int(queued["count"])


async def _call(request: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(request)
    except Refused as refused:
        raise ToolError(refused.message) from None


def serve_stdio(service: Service) -> None:
    """Runs until standard input ends."""
    hooks, deploys = RemoteHooks(service), RemoteDeploys(service)
    apps, deliveries = RemoteApps(service), RemoteDeliveries(service)
    tool_server(lambda _: hooks, lambda _: deploys, lambda _: apps, lambda _: deliveries).run("stdio")
