"""The common parts of the agent tools: a class per tool, a method per action.

A method's docstring describes its action, and its parameters are the action's arguments: the tool's schema is made from
them, and so are the messages that say how to correct a call.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Annotated, Any, Self, get_args, get_type_hints

import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import ToolAnnotations
from pydantic import PlainValidator, WithJsonSchema

from gateway.accounts.access import TOOL_CALLS, Access, Call, Where
from gateway.accounts.records import App
from gateway.api.bodies import decode_body
from gateway.api.resources import require_deploy, require_own_app
from gateway.deploys.records import Deploy
from gateway.deploys.views import DeployWithLog, view_with_log
from gateway.errors import ServiceError
from gateway.services import Services

ACCESS = "capsule.access"  # in the request's scope
TARGETS = ("app", "id", "email")  # the arguments that name what an action changes

# Accepts any value: `Arg.read` refuses wrong ones with messages that agents can act on.
ANYTHING = PlainValidator(lambda value: value)
KEYWORD = inspect.Parameter.KEYWORD_ONLY

Result = dict[str, Any]
LOG_CHARACTERS = 16_000  # the end of a log explains a failure


class Arg:
    """Describes an argument to agents: its meaning, and its JSON schema."""

    def __init__(self, meaning: str, kind: str | list[str] = "string", **schema: Any) -> None:
        self.meaning, self.schema = meaning, {"type": kind, **schema}

    @classmethod
    def of_fields(cls, change: type[msgspec.Struct]) -> dict[str, Self]:
        """Describes the fields of a change. What its docstring says goes for each of them."""
        rule, args = (inspect.getdoc(change) or "").removesuffix("."), {}
        for field in msgspec.structs.fields(change):
            schema = msgspec.json.schema(field.type)
            kinds = dict.fromkeys(choice.get("type", "object") for choice in schema["anyOf"])
            args[field.name] = cls(f"{schema['description']}. {rule}", [*kinds])
        return args

    def read(self, name: str, value: Any, action: str) -> Any:
        """Returns the value for the action, which checks the other types itself. Raises ToolError."""
        match self.schema:
            case {"enum": choices}:
                if value not in choices:
                    raise ToolError(f"{name} must be one of {', '.join(filter(None, choices))}.")
            case {"type": "string"}:
                if not isinstance(value, str) or not value.strip():
                    needed = f"{action} needs {name}" if action else f"{name} is needed"
                    raise ToolError(f"{needed}: {self.meaning}.")
                return value.strip()
            case {"type": "integer", "maximum": most}:
                # Agents write numbers as texts, too.
                if not re.fullmatch("[0-9]{1,9}", str(value)) or not 1 <= int(value) <= most:
                    raise ToolError(f"{name} must be a number from 1 to {most}.")
                return int(value)
        return value

    def as_parameter(self, name: str, description: str, default: Any) -> inspect.Parameter:
        """Returns a parameter, from which the SDK makes the schema."""
        schema = WithJsonSchema({**self.schema, "description": description})
        kind: Any = str if self.schema["type"] == "string" else Any  # the SDK parses JSON in the values of `Any`
        return inspect.Parameter(name, KEYWORD, default=default, annotation=Annotated[kind, ANYTHING, schema])


AppName = Annotated[str, Arg("the app's name")]


class Action:
    """A method of a tool, and what its signature says. The fields of the struct `change` are arguments, too."""

    def __init__(self, method: Any) -> None:
        self.method, self.meaning = method, " ".join(method.__doc__.split())
        hints = get_type_hints(method, include_extras=True)
        hints.pop("return")
        self.change: type[msgspec.Struct] | None = hints.pop("change", None)
        fields = {} if self.change is None else Arg.of_fields(self.change)
        self.args: dict[str, Arg] = {name: get_args(hint)[1] for name, hint in hints.items()} | fields
        self.fields = [*fields]
        self.defaults = {name: each.default for name, each in inspect.signature(method).parameters.items()}
        self.needs = [name for name in hints if self.defaults[name] is inspect.Parameter.empty]

    def read(self, given: Mapping[str, Any], action: str) -> dict[str, Any]:
        """Returns the method's arguments. Raises ToolError. `action` is "" for the only action of its tool."""
        read = {}
        for name, arg in self.args.items():
            value = given[name]
            # Agents fill in arguments that they do not need with empty values. Some arguments have null as a value.
            is_empty = value == "" or (value is None and "null" not in arg.schema["type"])
            if name in self.needs or not is_empty:
                read[name] = arg.read(name, value, action)
        if surplus := [name for name, value in given.items() if name not in self.args and value not in ("", None)]:
            raise ToolError(f"{action} does not take {' or '.join(surplus)}; leave it out.")
        if self.fields and not read.keys() & {*self.fields}:
            raise ToolError(f"{action} needs at least one of {', '.join(self.fields)}.")
        return read

    async def call(self, tool: "AgentTool", arguments: dict[str, Any]) -> Result:
        """Raises RequestMalformed for a wrong change."""
        if self.change is not None:
            fields = {name: arguments.pop(name) for name in self.fields if name in arguments}
            arguments["change"] = decode_body(msgspec.json.encode(fields), self.change)
        result: Result = msgspec.to_builtins(await self.method(tool, **arguments))
        return result


class AgentTool:
    """A tool, created for each call. Its public coroutine methods are its actions; one alone needs no `action`."""

    name: str
    title: str
    read_only = False
    actions: dict[str, Action]

    def __init_subclass__(cls) -> None:
        methods = {name: each for name, each in vars(cls).items() if inspect.iscoroutinefunction(each)}
        cls.actions = {name: Action(method) for name, method in methods.items() if not name.startswith("_")}

    def __init__(self, services: Services, scope: Mapping[str, Any]) -> None:
        self.services, self.scope = services, scope
        self.access: Access = scope[ACCESS]  # that of the API key of the HTTP request
        self.account = self.access.account

    async def _find_app(self, name: str) -> App:
        return await require_own_app(name, self.access, self.services.registry)

    async def _find_deploy(self, deploy_id: str) -> Deploy:
        return await require_deploy(deploy_id, self.access, self.services.deploy_records)

    async def _view_with_log(self, deploy: Deploy) -> DeployWithLog:
        return await view_with_log(deploy, self.services.deploy_records, self.services.deploy_logs)

    async def _show_deploy(self, deploy: Deploy) -> Result:
        """Returns a deploy with the end of its log."""
        view: Result = msgspec.to_builtins(await self._view_with_log(deploy))
        del view["logTimes"]
        return {**view, "log": view["log"][-LOG_CHARACTERS:]}

    def _permit(self, action: str, arguments: dict[str, Any]) -> Call | None:
        """Returns the call that the action makes, if it changes something. Raises NotPermitted.

        Checks the caller's right to the action, and sets `app` of a list to the key's only app."""
        calls = TOOL_CALLS[action]
        for call in calls:
            self.access.require(call)
        if self.access.only is not None and any(call.where is Where.FILTER for call in calls):
            self.access.require_app(arguments.get("app") or self.access.only.id)
            arguments["app"] = self.access.only.name
        return next((call for call in calls if call.changes), None)

    async def answer(self, given: dict[str, Any]) -> Result:
        """Returns the action's result, as JSON's types. Raises ToolError, for the service's errors too."""
        [only, *others] = self.actions
        name = given.pop("action") if others else only
        if not isinstance(name, str) or name not in self.actions:
            raise ToolError(f"action must be {self._list_actions()}.")
        arguments = self.actions[name].read(given, f"action '{name}'" if others else "")
        try:
            change = self._permit(f"{self.name} {name}" if others else self.name, arguments)
            async with self._record(change, arguments):
                return await self.actions[name].call(self, {**arguments})
        except ServiceError as error:
            raise ToolError(f"{error.message} ({error.code})") from None

    def _record(self, change: Call | None, arguments: Mapping[str, Any]) -> AbstractAsyncContextManager[None]:
        """Returns what records a change in the account's trail, unless it is refused."""
        if change is None:
            return nullcontext()
        target = str(next((arguments[name] for name in TARGETS if arguments.get(name)), ""))
        return self.services.account_trail.record(self.access, change.name, target, ToolError)

    @classmethod
    def make(cls, services: Services) -> Tool:
        """Returns the tool for the SDK's server."""

        async def call(context: Context[Any], **given: Any) -> Result:
            request = context.request_context.request
            assert request is not None
            return await cls(services, request.scope).answer(given)

        parameters = [inspect.Parameter("context", KEYWORD, annotation=Context[Any]), *cls._describe_arguments()]
        call.__name__, call.__doc__ = cls.name, inspect.getdoc(cls)
        call.__signature__ = inspect.Signature(parameters, return_annotation=Result)  # type: ignore[attr-defined]
        hints = ToolAnnotations(read_only_hint=cls.read_only, destructive_hint=not cls.read_only, open_world_hint=False)
        tool = Tool.from_function(call, title=cls.title, annotations=hints, structured_output=True)
        [only, *others] = cls.actions.values()
        tool.parameters["required"] = ["action"] if others else only.needs
        return tool

    @classmethod
    def _list_actions(cls) -> str:
        listed = []
        for name, action in cls.actions.items():
            needs = [*action.needs, f"any of {', '.join(action.fields)}"] if action.fields else action.needs
            listed.append(f"'{name}' (with {_join(needs, 'and')})" if needs else f"'{name}'")
        return _join(listed, "or")

    @classmethod
    def _describe_arguments(cls) -> Iterator[inspect.Parameter]:
        """Yields the arguments of all actions, each once: it means the same to all that take it."""
        [only, *others] = cls.actions.values()
        if others:
            meanings = [f"{name}: {each.meaning[0].lower()}{each.meaning[1:]}" for name, each in cls.actions.items()]
            yield Arg("", enum=[*cls.actions]).as_parameter("action", " ".join(meanings), "")
        for name, arg in {name: arg for each in cls.actions.values() for name, arg in each.args.items()}.items():
            takers = [action for action, each in cls.actions.items() if name in each.args]
            text = arg.meaning if len(takers) == len(cls.actions) else f"for {_join(takers, 'and')}: {arg.meaning}"
            default = "" if others or name in only.needs else only.defaults[name]
            yield arg.as_parameter(name, f"{text[0].upper()}{text[1:]}.", default)


def _join(words: Sequence[str], word: str) -> str:
    """Returns `a`, `a or b`, or `a, b, or c`."""
    *others, last = words
    comma = "," if len(others) > 1 else ""
    return f"{', '.join(others)}{comma} {word} {last}" if others else last
