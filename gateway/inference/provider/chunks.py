"""The events of a provider's answer, as far as they are read."""

import msgspec


class FunctionPart(msgspec.Struct, gc=False, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CallPart(msgspec.Struct, gc=False, omit_defaults=True):
    """A part of a tool call: first its id and its function's name, then the arguments in pieces."""

    index: int | None = None  # of the call within the answer
    id: str | None = None
    type: str | None = None
    function: FunctionPart | None = None


class Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPart] | None = None
    refusal: str | None = None
    function_call: FunctionPart | None = None  # of old providers, in place of `tool_calls`


class Choice(msgspec.Struct, gc=False):
    delta: Delta | None = None
    finish_reason: str | None = None
    index: int | None = 0
    message: Delta | None = None  # of a whole answer, in place of `delta`
    error: msgspec.Raw = msgspec.Raw()


class Chunk(msgspec.Struct, gc=False):
    choices: list[Choice] | None = None
    model: str | None = None
    usage: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
