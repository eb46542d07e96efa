"""What the agent tools have in common: each does one of several actions, which it finds in its arguments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import ToolAnnotations
from pydantic import PlainValidator, WithJsonSchema

from gateway.errors import ServiceError

# Accepts any value: `parse_arguments` refuses wrong ones with messages that agents can act on.
ANYTHING = PlainValidator(lambda value: value)


def text(description: str, **schema: Any) -> WithJsonSchema:
    """How an agent sees an argument."""
    return WithJsonSchema({"type": "string", "description": description, **schema})


def parse_arguments(
    action: Any,
    given: Mapping[str, Any],
    actions: Mapping[str, Mapping[str, str]],
    choices: str,
    optional: Collection[tuple[str, str]] = (),
) -> list[str]:
    """Returns the action's arguments, in order. Raises ToolError, which says how to correct the call.

    `actions` holds the arguments of each action with their meaning, `choices` describes the actions, and `optional`
    names arguments that an action may go without.
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
        raise ToolError(f"action '{action}' takes no {' and no '.join(surplus)}; leave it out.")
    return [(given[name] or "").strip() for name in takes]


async def answer(performed: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Turns the service's errors into ToolError."""
    try:
        return await performed
    except ServiceError as error:
        raise ToolError(f"{error.message} ({error.code})") from None


def make_tool(function: Callable[..., Any], title: str, *, read_only: bool = False) -> Tool:
    tool = Tool.from_function(
        function,
        title=title,
        annotations=ToolAnnotations(read_only_hint=read_only, destructive_hint=not read_only, open_world_hint=False),
        structured_output=True,
    )
    tool.parameters["required"] = ["action"]
    return tool
