"""What all agent tools have in common: a class is a tool, and each of its methods is an action.

The signature of a method is the only place that names its arguments. The tool's schema, the description of its actions
and the messages about wrong calls are made from the methods' signatures and docstrings. A tool with the single method
`run` has no argument `action`.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import ToolAnnotations
from pydantic import PlainValidator, WithJsonSchema

from gateway.accounts.records import Account, App
from gateway.api.bodies import decode_body
from gateway.api.subjects import require_deploy, require_own_app
from gateway.deploys.states import Deploy
from gateway.errors import ServiceError
from gateway.services import Services

T = TypeVar("T")

ACCOUNT = "capsule.account"  # in the request's scope

# Accepts any value: `AgentTool` refuses wrong ones with messages that agents can act on.
ANYTHING = PlainValidator(lambda value: value)


class Arg:
    """An argument of an action: its meaning, for agents, and its JSON type.

    A text that is not blank is stripped. Values of other types reach the action as they are. "" stands for an argument
    that was not given, because agents fill in arguments that they do not need.
    """

    def __init__(self, meaning: str, kind: str | list[str] = "string", *, hint: str = "", **schema: Any) -> None:
        """`hint` is added to the meaning in the schema, but not in messages."""
        self.meaning, self.is_text = meaning, kind == "string"
        self.schema = {"type": kind, "description": f"{meaning}{hint}.", **schema}


AppName = Annotated[str, Arg("the app's name")]
Action = Callable[..., Any]


class AgentTool:
    """One tool, called for one account."""

    name: ClassVar[str]
    title: ClassVar[str]
    read_only: ClassVar[bool] = False

    def __init__(self, services: Services, context: Context[Any]) -> None:
        request = context.request_context.request
        assert request is not None
        self.services, self.scope = services, request.scope
        self.account: Account = request.scope[ACCOUNT]

    async def app(self, name: str) -> App:
        """Returns the account's app. Raises NotFound."""
        return await require_own_app(name, self.account, self.services.registry)

    async def deploy(self, deploy_id: str) -> Deploy:
        """Returns the account's deploy. Raises NotFound."""
        return await require_deploy(deploy_id, self.account, self.services.deploys)

    @classmethod
    def make(cls, services: Services) -> Tool:
        """Returns the tool for the MCP server."""

        async def call(context: Context[Any], **given: Any) -> dict[str, Any]:
            return await cls(services, context)._call(given)

        actions = cls._actions()
        takes: dict[str, dict[str, Arg]] = {}  # name of the argument → the actions that take it
        for action, method in actions.items():
            for name, (arg, _) in _arguments_of(method).items():
                takes.setdefault(name, {})[action] = arg
        described: dict[str, Any] = {}
        required = ["action"]
        if "run" in actions:
            required = [name for name, (_, needed) in _arguments_of(actions["run"]).items() if needed]
        else:
            meaning = " ".join(f"{action}: {_describe(method)}" for action, method in actions.items())
            described["action"] = {"type": "string", "description": meaning, "enum": [*actions]}
        for name, by_action in takes.items():
            schema = [*by_action.values()][-1].schema
            *others, last = by_action
            used_by = f"{', '.join(others)} and {last}" if others else last
            text = f"For {used_by}: {schema['description']}" if len(by_action) < len(actions) else schema["description"]
            described[name] = {**schema, "description": text[:1].upper() + text[1:]}
        parameter = inspect.Parameter
        parameters = [
            parameter(
                name, parameter.KEYWORD_ONLY, default="", annotation=Annotated[Any, ANYTHING, WithJsonSchema(schema)]
            )
            for name, schema in described.items()
        ]
        call.__name__ = cls.name
        context = parameter("context", parameter.KEYWORD_ONLY, annotation=Context[Any])
        signature = inspect.Signature([context, *parameters], return_annotation=dict[str, Any])
        call.__signature__ = signature  # type: ignore[attr-defined]
        tool = Tool.from_function(
            call,
            name=cls.name,
            title=cls.title,
            description=inspect.getdoc(cls),
            annotations=ToolAnnotations(
                read_only_hint=cls.read_only, destructive_hint=not cls.read_only, open_world_hint=False
            ),
            structured_output=True,
        )
        tool.parameters["required"] = required
        return tool

    @classmethod
    def _actions(cls) -> dict[str, Action]:
        methods = {name: each for name, each in vars(cls).items() if inspect.iscoroutinefunction(each)}
        return {name.rstrip("_"): each for name, each in methods.items() if not name.startswith("_")}

    @classmethod
    def _choices(cls) -> str:
        shown = []
        for action, method in cls._actions().items():
            needs = [name for name, (_, needed) in _arguments_of(method).items() if needed]
            shown.append(f"'{action}'" + (f" (with {' and '.join(needs)})" if needs else ""))
        return (", ".join(shown[:-1]) + ("," if len(shown) > 2 else "")) + f" or {shown[-1]}"

    async def _call(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the result as JSON's types. Raises ToolError for wrong calls and the service's errors."""
        actions = self._actions()
        action = "run" if "run" in actions else given.pop("action", "")
        if not isinstance(action, str) or action not in actions:
            raise ToolError(f"action must be {self._choices()}.")
        arguments = self._parse(action, actions[action], given)
        try:
            result: dict[str, Any] = msgspec.to_builtins(await actions[action](self, **arguments))
        except ServiceError as error:
            raise ToolError(f"{error.message} ({error.code})") from None
        return result

    @staticmethod
    def _parse(action: str, method: Action, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments that were given. Raises ToolError, whose message says how to correct the call."""
        takes, parsed = _arguments_of(method), {}
        subject = "" if action == "run" else f"action '{action}' needs "
        for name, (arg, needed) in takes.items():
            value = given.get(name, "")
            if arg.is_text and (needed or value not in ("", None)):
                if not isinstance(value, str) or not value.strip():
                    raise ToolError(f"{subject}{name}{'' if subject else ' is needed'}: {arg.meaning}.")
                value = value.strip()
            if needed or (value != "" and not (arg.is_text and value is None)):
                parsed[name] = value
        if surplus := [name for name, value in given.items() if name not in takes and value not in ("", None)]:
            raise ToolError(f"action '{action}' does not take {' or '.join(surplus)}; leave it out.")
        return parsed


def _arguments_of(method: Action) -> dict[str, tuple[Arg, bool]]:
    """Returns the arguments of an action, and whether each is needed."""
    parameters = [each for each in inspect.signature(method).parameters.values() if each.name != "self"]
    return {each.name: (get_args(each.annotation)[1], each.default is each.empty) for each in parameters}


def _describe(method: Action) -> str:
    text = " ".join((inspect.getdoc(method) or "").split())
    return text[:1].lower() + text[1:]


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
    digits = "" if isinstance(value, bool) else str(value)
    if not re.fullmatch("[0-9]{1,9}", digits) or not 1 <= int(digits) <= most:
        raise ToolError(f"{name} must be a number from 1 to {most}.")
    return int(digits)
