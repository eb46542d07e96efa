"""OpenAI's Responses format, which newer clients speak by default. Nothing is stored, so nothing is continued."""

import time
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from gateway.errors import RequestMalformed, ServiceError
from gateway.inference.formats.completion import (
    INVALID_BODY,
    KEEP_ALIVE,
    CompletionRequest,
    FullAnswer,
    decode_again,
    encode,
    finish_reason,
    replace_halves,
)
from gateway.inference.formats.payload import (
    AtLeastOne,
    Part,
    Temperature,
    TopP,
    assistant_message,
    compose,
    find_fault,
    join_text,
)
from gateway.inference.formats.tools import (
    CalledFunction,
    Function,
    FunctionName,
    Name,
    Tool,
    ToolCall,
    ToolChoice,
)
from gateway.inference.provider.chunks import CallPart, Delta
from gateway.settings.prices import Usage

REASONING_ID = "rs_"  # begins the ids of thinking


# -- requests --------------------------------------------------------------------------------------------------


class Item(msgspec.Struct):
    """An item of the history. Clients send those of an answer back as they came."""

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None  # of thinking
    # Of a call, and of its output.
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    output: str | list[Part] | None = None


class OfferedTool(msgspec.Struct):
    type: str
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(msgspec.Struct):
    type: Literal["function"]
    name: Name


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct):
    format: TextFormat | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None


class ResponseRequest(msgspec.Struct):
    """`store` may be anything: nothing is stored."""

    input: str | list[Item] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: AtLeastOne | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: int | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None


_decode = msgspec.json.Decoder(ResponseRequest).decode
STORED = "nothing is stored; send the whole history as `input`, and let your client set `store` to false."
REFUSED = {
    "previous_response_id": STORED,
    "conversation": STORED,
    "background": "an answer is sent as it is made; leave it out.",
    "prompt": "no prompts are kept here; send its text as `instructions` and `input`.",
    "top_logprobs": "leave it out.",
}
KINDS = "only `message`, `function_call`, `function_call_output` and `reasoning` are supported."


def read_completion_request(body: bytes, _: bool) -> CompletionRequest:
    """Decodes the body, or raises its fault. Only the body decides about streaming, as in OpenAI's API."""
    try:
        asked = _decode(body)
    except INVALID_BODY:
        asked = decode_again(replace_halves(body), ResponseRequest, partial(find_fault, "input", ResponseRequest))
    _refuse_unsupported(asked)
    tools = [_tool_to_send(number, tool) for number, tool in enumerate(asked.tools or [])]
    choice = asked.tool_choice
    chosen = ToolChoice("function", FunctionName(choice.name)) if isinstance(choice, ChosenTool) else choice
    return compose(
        _messages_to_send(asked),
        {
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "reasoning_effort": asked.reasoning and asked.reasoning.effort,
            "response_format": _schema_to_send(asked.text),
            "tools": tools or None,
            "tool_choice": chosen,
            "parallel_tool_calls": asked.parallel_tool_calls,
        },
        model=asked.model,
        max_tokens=(asked.max_output_tokens,),
        stream=bool(asked.stream),
        make_format=partial(Responses, asked=_describe(asked)),
    )


def _refuse_unsupported(asked: ResponseRequest) -> None:
    for name, remedy in REFUSED.items():
        if getattr(asked, name):
            raise RequestMalformed(f"`{name}` is not supported here: {remedy}")
    if asked.truncation == "auto":
        raise RequestMalformed("`truncation` is always `disabled` here; shorten the history, or leave it out.")
    if any("logprobs" in each for each in asked.include or ()):
        raise RequestMalformed("`include` of logprobs is not supported here; leave it out.")
    if asked.tool_choice is not None and not asked.tools and asked.tool_choice != "auto":
        raise RequestMalformed("`tool_choice` needs `tools`; add them, or leave it out.")


def _tool_to_send(number: int, tool: OfferedTool) -> Tool:
    if tool.type != "function":
        raise RequestMalformed(f"tools[{number}].type: only functions are supported here; remove the other tools.")
    if tool.name is None:
        raise RequestMalformed(f"tools[{number}]: the field name is missing.")
    return Tool("function", Function(tool.name, tool.description, tool.parameters, tool.strict))


def _schema_to_send(text: TextSettings | None) -> dict[str, Any] | None:
    if text is None or (form := text.format) is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": form.type}
    if form.name is None or form.schema is None:
        raise RequestMalformed("text.format: the fields name and schema are needed.")
    fields = {name: getattr(form, name) for name in ("name", "description", "schema", "strict")}
    return {"type": form.type, form.type: {name: value for name, value in fields.items() if value is not None}}


class Turn:
    """A message of the assistant: the thinking, the text and the calls that belong together."""

    def __init__(self) -> None:
        self.text, self.reasoning, self.calls = "", "", list[ToolCall]()

    @property
    def has_spoken(self) -> bool:
        return bool(self.text or self.calls)


def _messages_to_send(asked: ResponseRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    if asked.input is None:
        raise RequestMalformed("body: the field input is missing.")
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    turn = Turn()

    def end_turn() -> None:
        nonlocal turn
        if turn.has_spoken or turn.reasoning:
            messages.append(assistant_message(turn.text, turn.reasoning, turn.calls))
        turn = Turn()

    for number, item in enumerate(asked.input):
        kind = "assistant" if item.type == "message" and item.role == "assistant" else item.type
        match kind:
            case "reasoning":
                if turn.has_spoken:
                    end_turn()
                parts = item.content or item.summary or ""
                turn.reasoning += parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
            case "assistant":
                if turn.has_spoken:
                    end_turn()
                turn.text = join_text("input", number, item.content or "")
            case "function_call":
                called = CalledFunction(_need(number, item, "name"), item.arguments)
                turn.calls.append(ToolCall(_need(number, item, "call_id"), called))
            case "function_call_output":
                end_turn()
                _need(number, item, "output")
                text = join_text("input", number, item.output or "", "output")
                messages.append({"role": "tool", "content": text, "tool_call_id": _need(number, item, "call_id")})
            case "message":
                end_turn()
                role, content = _need(number, item, "role"), _need(number, item, "content")
                # Some deployments do not know the newer name "developer" of the role "system".
                role = "system" if role == "developer" else role
                messages.append({"role": role, "content": join_text("input", number, content)})
            case "item_reference":
                if not (item.id or "").startswith(REASONING_ID):
                    raise RequestMalformed(f"input[{number}].type: `item_reference` leads nowhere: {STORED}")
            case _:
                raise RequestMalformed(f"input[{number}].type: {KINDS}")
    end_turn()
    return messages


def _need(number: int, item: Item, field: str) -> Any:
    if (value := getattr(item, field)) is None:
        raise RequestMalformed(f"input[{number}]: the field {field} is missing.")
    return value


def _describe(asked: ResponseRequest) -> bytes:
    """Returns the fields of a response that say what was asked for, but for the texts."""
    fields = {
        "background": False,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
        "store": False,
        "temperature": asked.temperature,
        "text": {"format": (asked.text and asked.text.format) or TextFormat("text")},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_p": asked.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }
    return encode(fields)[1:-1]


# -- answers ---------------------------------------------------------------------------------------------------


class ItemKind(NamedTuple):
    """An item of an answer with one text: its thinking, what it says, or its refusal."""

    prefix: str  # of its id
    item: bytes  # gets its id, its status and its content
    part: bytes  # gets its text
    event: bytes  # the beginning of the names of its events
    field: bytes  # of its text in them
    more: bytes = b""  # fields of its events


_MESSAGE = b'{"type":"message","id":"%b","status":"%b","role":"assistant","content":[%b]}'
REASONING = ItemKind(
    REASONING_ID,
    b'{"type":"reasoning","id":"%b","status":"%b","summary":[],"content":[%b]}',
    b'{"type":"reasoning_text","text":%b}',
    b"response.reasoning_text",
    b"text",
)
TEXT = ItemKind(
    "msg_",
    _MESSAGE,
    b'{"type":"output_text","annotations":[],"logprobs":[],"text":%b}',
    b"response.output_text",
    b"text",
    b',"logprobs":[]',
)
REFUSAL = ItemKind("msg_", _MESSAGE, b'{"type":"refusal","refusal":%b}', b"response.refusal", b"refusal")
COMPLETED, INCOMPLETE, IN_PROGRESS = b"completed", b"incomplete", b"in_progress"
INCOMPLETE_REASONS = {"length": b'{"reason":"max_output_tokens"}', "content_filter": b'{"reason":"content_filter"}'}


class OpenText(NamedTuple):
    """An item that grows."""

    kind: ItemKind
    place: int  # in the output
    id: bytes
    delta: bytes  # an event; gets its number and the text
    pieces: list[bytes]  # as JSON


class OpenCall(NamedTuple):
    place: int  # in the output
    id: bytes
    call_id: str
    name: str
    arguments: list[str]

    def describe(self, arguments: str, status: bytes) -> bytes:
        return b'{"type":"function_call","id":"%b","status":"%b","call_id":%b,"name":%b,"arguments":%b}' % (
            self.id,
            status,
            encode(self.call_id),
            encode(self.name),
            encode(arguments),
        )


class Responses:
    """Encodes one answer. It keeps the whole one, because the last events repeat it."""

    names_refusals = True

    def __init__(self, request_id: str, model: str, *, asked: bytes) -> None:
        """`asked`: the fields of the response that say what was asked for."""
        self._request_id, self._created, self._model, self._asked = request_id, int(time.time()), model, asked
        self._number = 0  # of the next event
        self._output: list[bytes] = []  # items as JSON; empty while one is open
        self._open: OpenText | None = None
        self._calls: dict[int | None, OpenCall] = {}  # by the number that the reader of the answer gives them
        self._refused = False

    def name_model(self, model: str) -> None:
        self._model = model

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def chunks(self, deltas: list[Delta]) -> bytes:
        out: list[bytes] = []
        for delta in deltas:
            if reasoning := delta.reasoning_content or delta.reasoning:
                out.append(self._add(REASONING, [encode(reasoning)]))
            if delta.content:
                out.append(self._add(TEXT, [encode(delta.content)]))
            if delta.refusal:
                out.append(self._add(REFUSAL, [encode(delta.refusal)]))
            out += map(self._add_to_call, delta.tool_calls or ())
        return b"".join(out)

    def texts(self, texts: list[bytes]) -> bytes:
        return self._add(TEXT, texts)

    def end(self, model: str, finish: str | None, usage: Usage | None) -> bytes:
        self.name_model(model)
        begun = self._begin()
        status, items, response = self._end(finish, usage)
        return b"".join([begun, items, self._event(b"response." + status, b'"response":' + response)])

    def error(self, error: ServiceError) -> bytes:
        begun = self._begin()
        response = self._response(b"failed", error=encode(error.event()))
        return begun + self._event(b"response.failed", b'"response":' + response)

    def full(self, answer: FullAnswer, model: str, finish: str | None, usage: Usage | None) -> bytes:
        self.name_model(model)
        for kind, text in ((REASONING, answer.reasoning), (TEXT, answer.text), (REFUSAL, answer.refusal)):
            if text:
                self._add(kind, [encode(text)])
        for part in answer.calls:
            self._add_to_call(part)
        return self._end(finish, usage)[2]

    # -- events ----------------------------------------------------------------------------------------------

    def _event(self, name: bytes, fields: bytes) -> bytes:
        number = self._number
        self._number += 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (name, name, number, fields)

    def _begin(self) -> bytes:
        """Returns the first two events, unless they were sent."""
        if self._number:
            return b""
        response = b'"response":' + self._response(IN_PROGRESS)
        return self._event(b"response.created", response) + self._event(b"response.in_progress", response)

    def _add(self, kind: ItemKind, texts: list[bytes]) -> bytes:
        """Returns the events of texts, which are already encoded as JSON."""
        begun = b""
        if (item := self._open) is None or item.kind is not kind:
            begun, item = self._open_text(kind)
        item.pieces.extend(texts)
        number = self._number
        self._number += len(texts)
        return begun + b"".join([item.delta % (number + place, text) for place, text in enumerate(texts)])

    def _open_text(self, kind: ItemKind) -> tuple[bytes, OpenText]:
        out = [self._begin(), self._close_text(COMPLETED)]
        index = len(self._output)
        self._output.append(b"")
        id = f"{kind.prefix}{self._request_id}_{index}".encode()
        place = b'"item_id":"%b","output_index":%d,"content_index":0' % (id, index)
        delta = b'event: %b.delta\ndata: {"type":"%b.delta","sequence_number":%%d,%b%b,"delta":%%b}\n\n'
        self._open = item = OpenText(kind, index, id, delta % (kind.event, kind.event, place, kind.more), [])
        self._refused = self._refused or kind is REFUSAL
        added = b'"output_index":%d,"item":%b' % (index, kind.item % (id, IN_PROGRESS, b""))
        out.append(self._event(b"response.output_item.added", added))
        out.append(self._event(b"response.content_part.added", b'%b,"part":%b' % (place, kind.part % b'""')))
        return b"".join(out), item

    def _close_text(self, status: bytes) -> bytes:
        if (item := self._open) is None:
            return b""
        self._open, kind = None, item.kind
        text = b'"%b"' % b"".join([piece[1:-1] for piece in item.pieces])
        place = b'"item_id":"%b","output_index":%d,"content_index":0' % (item.id, item.place)
        done = b'%b%b,"%b":%b' % (place, kind.more, kind.field, text)
        return (
            self._event(kind.event + b".done", done)
            + self._event(b"response.content_part.done", b'%b,"part":%b' % (place, kind.part % text))
            + self._close(item.place, kind.item % (item.id, status, kind.part % text))
        )

    def _add_to_call(self, part: CallPart) -> bytes:
        """Returns the events of a part of a call. Calls stay open to the end, because their parts may be mixed."""
        out = b""
        arguments = (part.function and part.function.arguments) or ""
        if (item := self._calls.get(part.index)) is None:
            out = self._begin() + self._close_text(COMPLETED)
            place = len(self._output)
            self._output.append(b"")
            name = (part.function and part.function.name) or ""
            item = OpenCall(place, f"fc_{self._request_id}_{place}".encode(), part.id or "", name, [])
            self._calls[part.index] = item
            added = b'"output_index":%d,"item":%b' % (place, item.describe("", IN_PROGRESS))
            out += self._event(b"response.output_item.added", added)
        if not arguments:
            return out
        item.arguments.append(arguments)
        delta = b'"item_id":"%b","output_index":%d,"delta":%b' % (item.id, item.place, encode(arguments))
        return out + self._event(b"response.function_call_arguments.delta", delta)

    def _close_calls(self, status: bytes) -> bytes:
        out = []
        for item in self._calls.values():
            arguments = "".join(item.arguments)
            name, text = encode(item.name), encode(arguments)
            done = b'"item_id":"%b","output_index":%d,"name":%b,"arguments":%b' % (item.id, item.place, name, text)
            out.append(self._event(b"response.function_call_arguments.done", done))
            out.append(self._close(item.place, item.describe(arguments, status)))
        return b"".join(out)

    def _close(self, index: int, item: bytes) -> bytes:
        self._output[index] = item
        return self._event(b"response.output_item.done", b'"output_index":%d,"item":%b' % (index, item))

    # -- the response ----------------------------------------------------------------------------------------

    def _end(self, finish: str | None, usage: Usage | None) -> tuple[bytes, bytes, bytes]:
        """Returns the status, the events that close the open items, and the response."""
        reason = None if self._refused else INCOMPLETE_REASONS.get(finish_reason(finish))
        status = COMPLETED if reason is None else INCOMPLETE
        items = self._close_text(status) + self._close_calls(status)
        return status, items, self._response(status, reason or b"null", usage=encode(_usage_fields(usage)))

    def _response(
        self, status: bytes, incomplete: bytes = b"null", *, error: bytes = b"null", usage: bytes = b"null"
    ) -> bytes:
        head = {"id": f"resp_{self._request_id}", "object": "response", "created_at": self._created}
        return b'%b,"model":%b,"status":"%b","error":%b,"incomplete_details":%b,"output":[%b],"usage":%b,%b}' % (
            encode(head)[:-1],
            encode(self._model),
            status,
            error,
            incomplete,
            b",".join(filter(None, self._output)),
            usage,
            self._asked,
        )


def _usage_fields(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    details = usage.details or {}
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": 0} | details.get("prompt_tokens_details", {}),
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": 0} | details.get("completion_tokens_details", {}),
        "total_tokens": usage.input + usage.output,
    }
