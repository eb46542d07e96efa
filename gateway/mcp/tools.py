"""The common parts of the agent tools: each tool has several actions, chosen by its argument `action`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import ToolAnnotations
from pydantic import PlainValidator, WithJsonSchema

from gateway.accounts.records import Account
from gateway.api.bodies import decode_body
from gateway.errors import ServiceError

T = TypeVar("T")

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


def value(kind: str | list[str], description: str, **schema: Any) -> WithJsonSchema:
    """Describes an argument that is not a text."""
    return WithJsonSchema({"type": kind, "description": description, **schema})


def parse_arguments(
    action: Any,
    given: Mapping[str, Any],
    actions: Mapping[str, Mapping[str, str]],
    choices: str,
    optional: Collection[tuple[str, str]] = (),
    values: Collection[str] = (),
) -> list[Any]:
    """Returns the action's arguments, in order. Raises ToolError, whose message says how to correct the call.

    `actions` holds the arguments of each action with their meaning, `choices` describes the actions, and `optional`
    holds the pairs of an action and an argument that it does not need. The arguments are texts, except for `values`,
    which the action checks itself: "" stands for one that was not given.
    """
    if not isinstance(action, str) or action not in actions:
        raise ToolError(choices)
    takes = actions[action]
    for name, meaning in takes.items():
        if name in values:
            continue
        may_miss = (action, name) in optional and given[name] in ("", None)
        if not may_miss and (not isinstance(given[name], str) or not given[name].strip()):
            raise ToolError(f"action '{action}' needs {name}: {meaning}.")
    # Agents fill in arguments that they do not need with empty values.
    surplus = [name for name, value in given.items() if name not in takes and value not in ("", None)]
    if surplus:
        raise ToolError(f"action '{action}' does not take {' or '.join(surplus)}; leave it out.")
    return [given[name] if name in values else (given[name] or "").strip() for name in takes]


def read_fields(given: Mapping[str, Any], kind: type[T]) -> T:
    """Returns the given fields as the body of a request. Raises ToolError if there are none, and RequestMalformed."""
    fields = {name: value for name, value in given.items() if value != ""}
    if not fields:
        raise ToolError(f"action 'set' needs at least one of {', '.join(given)}.")
    return decode_body(msgspec.json.encode(fields), kind)


def read_number(name: str, value: Any, default: int, most: int) -> int:
    """Returns an optional number from 1. Agents write numbers as texts too. Raises ToolError."""
    if value in ("", None):
        return default
    text_of = str(value) if not isinstance(value, bool) else ""
    if not (text_of.isascii() and text_of.isdigit() and 1 <= int(text_of[:9]) <= most):
        raise ToolError(f"{name} must be a number from 1 to {most}.")
    return int(text_of)


def require_text(name: str, value: Any, meaning: str) -> str:
    """Returns an argument that a tool without actions needs. Raises ToolError."""
    if not isinstance(value, str) or not value.strip():
        raise ToolError(f"{name} is needed: {meaning}.")
    return value.strip()


async def answer(performed: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of the action, as JSON's types. Raises ToolError for the service's errors."""
    try:
        result: dict[str, Any] = msgspec.to_builtins(await performed)
    except ServiceError as error:
        raise ToolError(f"{error.message} ({error.code})") from None
    return result


def make_tool(
    function: Callable[..., Any], title: str, *, read_only: bool = False, required: Sequence[str] = ("action",)
) -> Tool:
    tool = Tool.from_function(
        function,
        title=title,
        annotations=ToolAnnotations(read_only_hint=read_only, destructive_hint=not read_only, open_world_hint=False),
        structured_output=True,
    )
    tool.parameters["required"] = [*required]
    return tool
