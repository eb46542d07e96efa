"""The common parts of the agent tools: each tool has several actions, chosen by its argument `action`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import ToolAnnotations
from pydantic import PlainValidator, WithJsonSchema

from gateway.accounts.records import Account
from gateway.errors import ServiceError

ACCOUNT = "capsule.account"  # in the request's scope

# Accepts any value: `parse_arguments` refuses wrong ones with messages that agents can act on.
ANYTHING = PlainValidator(lambda value: value)


def account_of(context: Context[Any]) -> Account:
    """Returns the account whose API key the HTTP request carried."""
    request = context.request_context.request
    assert request is not None
    account: Account = request.scope[ACCOUNT]
    return account


def text(description: str, **schema: Any) -> WithJsonSchema:
    """Describes an argument to agents."""
    return WithJsonSchema({"type": "string", "description": description, **schema})


def parse_arguments(
    action: Any,
    given: Mapping[str, Any],
    actions: Mapping[str, Mapping[str, str]],
    choices: str,
    optional: Collection[tuple[str, str]] = (),
) -> list[str]:
    """Returns the action's arguments, in order. Raises ToolError, whose message says how to correct the call.

    `actions` holds the arguments of each action with their meaning, `choices` describes the actions, and `optional`
    holds the pairs of an action and an argument that it does not need.
    """
    if not isinstance(action, str) or action not in actions:
        raise ToolError(choices)
    takes = actions[action]
    for name, meaning in takes.items():
        may_miss = (action, name) in optional and given[name] in ("", None)
        if not may_miss and (not isinstance(given[name], str) or not given[name].strip()):
            raise ToolError(f"action '{action}' needs {name}: {meaning}.")
    # Agents fill in arguments that they do not need with empty values.
    surplus = [name for name, value in given.items() if name not in takes and value not in ("", None)]
    if surplus:
        raise ToolError(f"action '{action}' does not take {' or '.join(surplus)}; leave it out.")
    return [(given[name] or "").strip() for name in takes]


async def answer(performed: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of the action, as JSON's types. Raises ToolError for the service's errors."""
    try:
        result: dict[str, Any] = msgspec.to_builtins(await performed)
    except ServiceError as error:
        raise ToolError(f"{error.message} ({error.code})") from None
    return result


def make_tool(function: Callable[..., Any], title: str, *, read_only: bool = False) -> Tool:
    tool = Tool.from_function(
        function,
        title=title,
        annotations=ToolAnnotations(read_only_hint=read_only, destructive_hint=not read_only, open_world_hint=False),
        structured_output=True,
    )
    tool.parameters["required"] = ["action"]
    return tool
