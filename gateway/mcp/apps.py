"""The agent tool `service_app`: creates, lists, shows, changes and deletes an account's apps."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool

from gateway.accounts.records import Account
from gateway.api.apps import (
    AppChange,
    NewApp,
    change_app,
    create_app,
    delete_app,
    view_app_details,
    view_apps,
    view_settings,
)
from gateway.api.bodies import decode_body
from gateway.api.subjects import require_own_app
from gateway.mcp.tools import ANYTHING, account_of, answer, make_tool, parse_arguments, read_fields, text, value
from gateway.services import Services

MAX_FINDINGS = 50  # the most urgent ones

# The arguments of each action, with their meaning.
NAME = {"app": "the app's name"}
FIELDS = {
    "auth": "how tokens of the app's users are verified",
    "repository": "the repository that is built",
    "build": "how the app is built and started",
}
ACTIONS: dict[str, dict[str, str]] = {
    "create": {"app": "the new app's name, the first part of its address"},
    "list": {},
    "show": NAME,
    "set": NAME | FIELDS,
    "delete": NAME,
}
CHOICES = "action must be 'create' (with app), 'list', 'show' (with app), 'set' (with app and fields), or 'delete'."

Action = Annotated[
    str,
    ANYTHING,
    text(
        "create: create the app `app`, a name of lower-case letters, digits and hyphens. "
        "list: list all apps, with status and health. show: show one `app`, with its settings, its certificate, its "
        "health history, its open security findings and its latest crashes. set: change `auth`, `repository` or "
        "`build` of `app`. delete: delete `app` with its hooks, variables and sources, which cannot be undone.",
        enum=list(ACTIONS),
    ),
]
AppName = Annotated[str, ANYTHING, text("For all actions but list: the app's name.")]
RESET = "null resets it; leave it out to keep it."
Auth = Annotated[
    Any,
    ANYTHING,
    value(
        ["object", "null"],
        'For set: how the tokens of the app\'s users are verified, such as {"kind": "jwks", "url": '
        '"/api/auth/jwks"}, {"kind": "backend", "url": "https://…"} or {"kind": "secret", "secret": "…"}. ' + RESET,
    ),
]
Repository = Annotated[
    Any,
    ANYTHING,
    value(["object", "null"], 'For set: such as {"url": "https://…", "branch": "main"}. ' + RESET),
]
Build = Annotated[
    Any,
    ANYTHING,
    value(
        ["object", "null"],
        'For set: such as {"command": "npm ci && npm run build", "output": "dist"}, or with "start", the command of '
        "its backend. Applies from the next deploy on. " + RESET,
    ),
]


async def perform(services: Services, account: Account, action: str, arguments: list[Any]) -> dict[str, Any]:
    match action:
        case "create":
            new = decode_body(msgspec.json.encode({"name": arguments[0]}), NewApp)
            created = await create_app.fn(
                account=account,
                data=new,
                settings=services.settings,
                store=services.store,
                app_changes=services.app_changes,
            )
            return {"app": created, "note": "Publish it with service_publish."}
        case "list":
            apps = await services.registry.list_apps(account.id)
            return {"apps": await view_apps(account, apps, services.settings, services.store)}
        case "show":
            return {"app": await show(services, account, arguments[0])}
        case "set":
            change = read_fields(dict(zip(FIELDS, arguments[1:], strict=True)), AppChange)
            changed = await change_app.fn(
                account=account,
                app=arguments[0],
                data=change,
                settings=services.settings,
                vault=services.vault,
                registry=services.registry,
                app_changes=services.app_changes,
                users=services.users,
            )
            return {"settings": changed}
        case _:
            await delete_app.fn(
                account=account,
                app=arguments[0],
                registry=services.registry,
                app_changes=services.app_changes,
                removal=services.removal,
            )
            return {"deleted": arguments[0]}


async def show(services: Services, account: Account, name: str) -> dict[str, Any]:
    app = await require_own_app(name, account, services.registry)
    view: dict[str, Any] = msgspec.to_builtins(
        await view_app_details(account, app, services.settings, services.store, services.deploys)
    )
    findings, crashes = await services.findings.find_open(app), await services.crashes.list(app)
    return {**view, "settings": view_settings(app), "findings": findings[:MAX_FINDINGS], "crashes": crashes}


def app_tool(services: Services) -> Tool:
    async def service_app(
        context: Context[Any],
        action: Action = "",
        app: AppName = "",
        auth: Auth = "",
        repository: Repository = "",
        build: Build = "",
    ) -> dict[str, Any]:
        """Create, list, show, change or delete apps. 'show' has health, settings, security findings and crashes."""
        given = {"app": app, "auth": auth, "repository": repository, "build": build}
        arguments = parse_arguments(action, given, ACTIONS, CHOICES, values=FIELDS)
        return await answer(perform(services, account_of(context), action, arguments))

    return make_tool(service_app, "Apps")
