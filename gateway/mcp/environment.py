"""The agent tool `service_env`: an app's environment variables. No answer has a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool

from gateway.accounts.records import Account
from gateway.api.bodies import decode_map
from gateway.api.subjects import require_own_app
from gateway.mcp.tools import ANYTHING, account_of, answer, make_tool, parse_arguments, text, value
from gateway.services import Services

# The arguments of each action, with their meaning.
ACTIONS: dict[str, dict[str, str]] = {
    "list": {"app": "the app's name"},
    "set": {"app": "the app's name", "variables": "the new values"},
    "unset": {"app": "the app's name", "variables": "the names"},
}
CHOICES = "action must be 'list' (with app), 'set' or 'unset' (with app and variables)."
NOTE = "Applies from the next deploy on."

Action = Annotated[
    str,
    ANYTHING,
    text(
        "list: list the names of the variables of `app`. set: set `variables`. unset: remove `variables`. A change "
        "applies from the next deploy on.",
        enum=list(ACTIONS),
    ),
]
AppName = Annotated[str, ANYTHING, text("The app's name.")]
Variables = Annotated[
    Any,
    ANYTHING,
    value(
        ["object", "array"],
        'For set: names with values, such as {"DATABASE_URL": "postgres://…"}. For unset: a list of names.',
    ),
]


def read_changes(action: str, variables: Any) -> Mapping[str, str | None]:
    """Returns the changes by name. Raises ToolError and RequestMalformed."""
    if action == "unset" and isinstance(variables, str) and variables:
        variables = [variables]
    if action == "unset" and isinstance(variables, list | dict) and variables:
        return dict.fromkeys(map(str, variables))
    if action == "set" and isinstance(variables, dict) and variables:
        return decode_map(msgspec.json.encode(variables), str)
    needed = '{"NAME": "value"}' if action == "set" else '["NAME"]'
    raise ToolError(f"action '{action}' needs variables, such as {needed}.")


async def perform(services: Services, account: Account, action: str, arguments: list[Any]) -> dict[str, Any]:
    app = await require_own_app(arguments[0], account, services.registry)
    if action == "list":
        return {"variables": await services.environments.list_variables(app)}
    await services.environments.change_variables(app, read_changes(action, arguments[1]))
    return {"variables": await services.environments.list_variables(app), "note": NOTE}


def environment_tool(services: Services) -> Tool:
    async def service_env(
        context: Context[Any], action: Action = "", app: AppName = "", variables: Variables = ""
    ) -> dict[str, Any]:
        """List, set or remove an app's environment variables. Values are never shown."""
        given = {"app": app, "variables": variables}
        arguments = parse_arguments(action, given, ACTIONS, CHOICES, values=["variables"])
        return await answer(perform(services, account_of(context), action, arguments))

    return make_tool(service_env, "Environment variables")
