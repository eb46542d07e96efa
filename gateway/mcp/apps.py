"""The agent tool `service_app`: lists an account's apps, and shows one with its findings and crashes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool

from gateway.accounts.app_detail_routes import view_app_details
from gateway.accounts.records import Account
from gateway.accounts.routes import view_apps
from gateway.deploys.routes import require_own_app
from gateway.mcp.tools import ANYTHING, account_of, answer, make_tool, parse_arguments, text
from gateway.process import Gateway

MAX_FINDINGS = 50  # the most urgent ones

# The arguments of each action, with their meaning.
ACTIONS: dict[str, dict[str, str]] = {"list": {}, "show": {"app": "the app's name"}}
CHOICES = "action must be 'list' or 'show' (with app)."

Action = Annotated[
    str,
    ANYTHING,
    text(
        "list: list all apps, with status and health. show: show one `app`, with its certificate, its health history, "
        "its open security findings and its latest crashes.",
        enum=list(ACTIONS),
    ),
]
AppName = Annotated[str, ANYTHING, text("For show: the app's name.")]


async def perform(gateway: Gateway, account: Account, action: str, arguments: list[str]) -> dict[str, Any]:
    if action == "list":
        apps = await gateway.registry.list_apps(account.id)
        return {"apps": await view_apps(account, apps, gateway)}
    app = await require_own_app(arguments[0], account, gateway)
    view = msgspec.structs.asdict(await view_app_details(account, app, gateway))
    findings, crashes = await gateway.findings.find_open(app), await gateway.crashes.list(app)
    return {"app": {**view, "findings": findings[:MAX_FINDINGS], "crashes": crashes}}


def app_tool(gateway: Gateway) -> Tool:
    async def service_app(context: Context[Any], action: Action = "", app: AppName = "") -> dict[str, Any]:
        """List apps, or show one: health, certificate, security findings, crashes."""
        arguments = parse_arguments(action, {"app": app}, ACTIONS, CHOICES)
        return await answer(perform(gateway, account_of(context), action, arguments))

    return make_tool(service_app, "Apps", read_only=True)
