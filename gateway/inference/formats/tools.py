"""Tools in the OpenAI format: the functions that a request offers, and the calls in an answer."""

import contextlib
from typing import Annotated, Any, Literal

import msgspec

from gateway.inference.formats.completion import INVALID_BODY, encode, replace_halves
from gateway.inference.provider.chunks import CallPart, FunctionPart

Name = Annotated[str, msgspec.Meta(min_length=1)]


class Function(msgspec.Struct, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct):
    name: Name


class ToolChoice(msgspec.Struct):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(msgspec.Struct):
    name: str
    arguments: Any = None  # JSON, as the model wrote it; a client may send its value, or leave it out


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def object_of(arguments: Any) -> str:
    """Returns the arguments of an earlier call as the JSON of an object: of no arguments, if they are none."""
    if isinstance(arguments, dict):
        return encode(arguments).decode()
    if not isinstance(arguments, str):
        return "{}"
    if _is_object(arguments):
        return arguments
    mended = replace_halves(arguments.encode()).decode()
    return mended if _is_object(mended) else "{}"


def _is_object(text: str) -> bool:
    with contextlib.suppress(*INVALID_BODY):
        _decode_object(text)
        return True
    return False


def join_calls(parts: list[CallPart]) -> list[ToolCall]:
    """Joins the calls of a whole answer, whose parts the reader of the answer has numbered."""
    calls: dict[int | None, ToolCall] = {}
    arguments: dict[int | None, list[str]] = {}
    for part in parts:
        index, function = part.index, part.function or FunctionPart()
        if index not in calls:
            calls[index], arguments[index] = ToolCall(part.id or "", CalledFunction("", "")), []
        calls[index].function.name = calls[index].function.name or function.name or ""
        arguments[index].append(function.arguments or "")
    for index, call in calls.items():
        call.function.arguments = "".join(arguments[index])
    return list(calls.values())
