"""The agent tool `service_app`: lists an account's apps, and shows one with its findings and crashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Protocol

import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool

from gateway.accounts.app_detail_routes import view_app
from gateway.accounts.records import Account
from gateway.accounts.routes import view_apps
from gateway.deploys.routes import require_own_app
from gateway.mcp.tools import ANYTHING, answer, make_tool, parse_arguments, text
from gateway.process import Gateway

FINDINGS = 50  # the most urgent ones

# The arguments of each action, with their meaning.
ACTIONS: dict[str, dict[str, str]] = {"list": {}, "show": {"app": "the app's name"}}
CHOICES = "action must be 'list' or 'show' (with app)."


class AccountApps(Protocol):
    """The apps of one account. Raises ServiceError or ToolError."""

    async def list(self) -> list[dict[str, Any]]: ...
    async def show(self, app: str) -> dict[str, Any]: ...


Action = Annotated[
    str,
    ANYTHING,
    text(
        "list: all apps, with status and health. show: one `app`, with its certificate, the history of its health, "
        "its open security findings and its last crashes.",
        enum=list(ACTIONS),
    ),
]
AppName = Annotated[str, ANYTHING, text("For show: the app's name.")]


async def perform(apps: AccountApps, action: str, arguments: list[str]) -> dict[str, Any]:
    if action == "list":
        return {"apps": await apps.list()}
    return {"app": await apps.show(*arguments)}


def app_tool(apps_of: Callable[[Context[Any]], AccountApps]) -> Tool:
    """`apps_of` returns the apps of the caller's account."""

    async def service_app(context: Context[Any], action: Action = "", app: AppName = "") -> dict[str, Any]:
        """List apps, or show one: health, certificate, security findings, crashes."""
        arguments = parse_arguments(action, {"app": app}, ACTIONS, CHOICES)
        return await answer(perform(apps_of(context), action, arguments))

    return make_tool(service_app, "Apps", read_only=True)


class LocalApps:
    """The apps of an account, in this process."""

    def __init__(self, gateway: Gateway, account: Account) -> None:
        self._gateway, self._account = gateway, account

    async def list(self) -> list[dict[str, Any]]:
        apps = await self._gateway.registry.apps_of(self._account.id)
        return [msgspec.to_builtins(view) for view in await view_apps(self._account, apps, self._gateway)]

    async def show(self, app: str) -> dict[str, Any]:
        found = await require_own_app(app, self._account, self._gateway)
        shown: dict[str, Any] = msgspec.to_builtins(await view_app(self._account, found, self._gateway))
        findings, crashes = await self._gateway.findings.find_open(found), await self._gateway.crashes.list(found)
        return {**shown, "findings": msgspec.to_builtins(findings[:FINDINGS]), "crashes": msgspec.to_builtins(crashes)}
