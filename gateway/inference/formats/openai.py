"""OpenAI's chat-completions format, for unmodified OpenAI SDKs."""

import calendar
import time
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from gateway.errors import MultimodalUnsupported, RequestMalformed, ServiceError
from gateway.inference.formats.completion import (
    INVALID_BODY,
    CompletionRequest,
    FullAnswer,
    check_model,
    decode_again,
    encode,
    finish_reason,
    malformed,
    replace_halves,
)
from gateway.inference.formats.tools import Tool, ToolCall, ToolChoice, join_calls, object_of
from gateway.inference.provider.chunks import Delta
from gateway.inference.provider.dialects import TOOL_CALLS
from gateway.settings.prices import DEFAULT_MODEL, MAX_OUTPUT_TOKENS, MESSAGE_TOKENS, PRICED_ON, Usage

FORWARDED = (
    "temperature",
    "top_p",
    "stop",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "reasoning_effort",
    "response_format",
)
FORWARDED_WITH_TOOLS = (*FORWARDED, "tools", "tool_choice", "parallel_tool_calls")


Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""
    thinking: str = ""


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None  # an assistant's message may have none
    # The next three are of an assistant. Clients send them back as they came.
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None  # of a tool


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Completion(msgspec.Struct):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    reasoning_effort: str | None = None
    response_format: dict[str, Any] | None = None
    n: AtLeastOne | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    logprobs: Any = None
    audio: Any = None
    modalities: list[str] | None = None


_decode = msgspec.json.Decoder(Completion).decode
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
PART_TYPES = (
    "only text is supported, in parts of the types `text`, `input_text`, `output_text`, `refusal`, and in messages of "
    "the assistant `thinking`; remove images, audio, video, files and other parts."
)


def read_completion_request(body: bytes, wants_stream: bool) -> CompletionRequest:
    """Decodes the body, or raises its fault. Only the body decides about streaming, as in OpenAI's API."""
    try:
        completion = _decode(body)
    except INVALID_BODY:
        completion = decode_again(replace_halves(body), Completion, _fault)
    _refuse_unsupported(completion)
    messages = _join_system([_message_to_send(number, message) for number, message in enumerate(completion.messages)])
    text_bytes = sum(map(_bytes_of_message, messages))
    if not text_bytes:
        raise RequestMalformed("The messages contain no text.")
    model = check_model(DEFAULT_MODEL if completion.model is None else completion.model)
    limits = [m for m in (completion.max_tokens, completion.max_completion_tokens) if m is not None]
    max_tokens = min([*limits, MAX_OUTPUT_TOKENS])
    request: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    forwarded = FORWARDED_WITH_TOOLS if completion.tools else FORWARDED
    settings = {name: value for name in forwarded if (value := getattr(completion, name)) is not None}
    # The provider may put any of these into the prompt, as it does with a schema, and then bills it.
    settings_bytes = sum(len(encode(value)) for value in settings.values() if type(value) not in (int, float))
    options = completion.stream_options
    return CompletionRequest(
        model=model,
        max_tokens=max_tokens,
        text_bytes=text_bytes + MESSAGE_TOKENS * (len(messages) - 1) + settings_bytes,
        stream=bool(completion.stream),
        payload=encode(request | settings),
        with_usage=options is not None and bool(options.include_usage),
    )


def _refuse_unsupported(completion: Completion) -> None:
    if completion.audio or any(kind != "text" for kind in completion.modalities or ()):
        raise MultimodalUnsupported
    for name in ("functions", "function_call"):
        if getattr(completion, name):
            raise RequestMalformed(f"`{name}` is not supported here; use `tools`.")
    if completion.logprobs:
        raise RequestMalformed("`logprobs` is not supported here; leave it out.")
    if completion.tool_choice is not None and not completion.tools:
        raise RequestMalformed("`tool_choice` needs `tools`; add them, or leave it out.")
    if completion.n is not None and completion.n > 1:
        raise RequestMalformed("`n` above 1 is not supported here; send several requests.")


def _join_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with all system texts in the first one: chat templates drop or refuse further ones."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    if not texts:
        return messages
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _message_to_send(number: int, message: Message) -> dict[str, Any]:
    role = message.role
    if role == "assistant":
        return _assistant_message(number, message)
    if message.content is None:
        raise RequestMalformed(f"messages[{number}].content: must be text or a list, not null.")
    text = _text(number, message.content)
    if role == "tool":
        if message.tool_call_id is None:
            raise RequestMalformed(f"messages[{number}]: the field tool_call_id is missing.")
        return {"role": role, "content": text, "tool_call_id": message.tool_call_id}
    # Some deployments do not know the newer name "developer" of the role "system".
    return {"role": "system" if role == "developer" else role, "content": text}


def _assistant_message(number: int, message: Message) -> dict[str, Any]:
    content = message.content or message.refusal or ""
    reasoning = message.reasoning_content or message.reasoning or ""
    if not isinstance(content, str):
        reasoning = reasoning or "\n".join(part.thinking for part in content if part.type == "thinking")
        content = [part for part in content if part.type != "thinking"]
    sent: dict[str, Any] = {"role": message.role, "content": _text(number, content)}
    if reasoning:
        # Each provider reads one of the two names; vLLM reads another one than it once did.
        sent |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if message.tool_calls:
        for call in message.tool_calls:
            call.function.arguments = object_of(call.function.arguments)  # chat templates parse it
        sent |= {"content": sent["content"] or None, "tool_calls": message.tool_calls}
    return sent


def _bytes_of_message(sent: dict[str, Any]) -> int:
    """Returns the priced bytes: the text and the reasoning, and the JSON of tool calls and their ids."""
    calls = sum(len(encode(sent[name])) for name in ("tool_calls", "tool_call_id") if name in sent)
    return len((sent["content"] or "").encode()) + len(sent.get("reasoning", "").encode()) + calls


def _text(number: int, content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    for place, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise _unsupported_part(number, place)
    return "\n".join(part.refusal if part.type == "refusal" else part.text for part in content)


def _unsupported_part(number: int, place: int) -> MultimodalUnsupported:
    return MultimodalUnsupported(f"messages[{number}].content[{place}].type: {PART_TYPES}")


def _fault(fields: Any, error: Exception) -> ServiceError:
    """Returns whether the fields of a refused body are multimodal or malformed."""
    messages = fields.get("messages") if isinstance(fields, dict) else None
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for place, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict) and part.get("type", "text") not in (*TEXT_PARTS, "thinking"):
                return _unsupported_part(number, place)
    return malformed(error)


class OpenAI:
    """Encodes one answer, with its id and the model in every chunk."""

    def __init__(self, request_id: str, model: str, with_usage: bool) -> None:
        self._id, self._created = f"chatcmpl-{request_id}", int(time.time())
        self._with_usage = with_usage
        self._first = True
        self._model = ""
        self.name_model(model)

    def name_model(self, model: str) -> None:
        if model != self._model:
            self._model = model
            self._head = encode(
                {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": model}
            )[:-1]

    def _chunk(self, delta: bytes, finish: bytes = b"null") -> bytes:
        if self._first:
            self._first = False
            delta = b'{"role":"assistant",' + delta[1:] if delta != b"{}" else b'{"role":"assistant","content":""}'
        return b'data: %b,"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (
            self._head,
            delta,
            finish,
        )

    @property
    def keep_alive(self) -> bytes:
        return self._chunk(b"{}")

    def chunks(self, deltas: list[Delta]) -> bytes:
        out = []
        for delta in deltas:
            if reasoning := delta.reasoning_content or delta.reasoning:
                out.append(self._chunk(b'{"reasoning_content":%b}' % encode(reasoning)))
            if delta.content:
                out.append(self._chunk(b'{"content":%b}' % encode(delta.content)))
            if delta.refusal:
                out.append(self._chunk(b'{"refusal":%b}' % encode(delta.refusal)))
            if delta.tool_calls:
                out.append(self._chunk(b'{"tool_calls":%b}' % encode(delta.tool_calls)))
        return b"".join(out)

    def texts(self, texts: list[bytes]) -> bytes:
        return b"".join([self._chunk(b'{"content":%b}' % text) for text in texts])

    def end(self, model: str, finish: str | None, usage: Usage | None) -> bytes:
        self.name_model(model)
        out = self._chunk(b"{}", encode(finish_reason(finish, TOOL_CALLS)))
        if self._with_usage:
            out += b'data: %b,"choices":[],"usage":%b}\n\n' % (self._head, encode(_usage_fields(usage)))
        return out + b"data: [DONE]\n\n"

    def error(self, error: ServiceError) -> bytes:
        return b"data: %b\n\n" % encode({"error": error.event()})

    def full(self, answer: FullAnswer, model: str, finish: str | None, usage: Usage | None) -> bytes:
        self.name_model(model)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.refusal:
            message |= {"content": answer.text or None, "refusal": answer.refusal}
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": join_calls(answer.calls)}
        reason = finish_reason(finish, TOOL_CALLS)
        return self._head.replace(b"chat.completion.chunk", b"chat.completion", 1) + b',"choices":[%b],"usage":%b}' % (
            encode({"index": 0, "message": message, "logprobs": None, "finish_reason": reason}),
            encode(_usage_fields(usage)),
        )


def _usage_fields(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.input + usage.output,
        **(usage.details or {}),
    }


def list_models(names: Iterable[str]) -> dict[str, bytes]:
    """Returns the answers by path: the list of models, and each model."""
    created = calendar.timegm(time.strptime(PRICED_ON, "%Y-%m-%d"))
    models = {m: {"id": m, "object": "model", "created": created, "owned_by": "capsule"} for m in names}
    listing = encode({"object": "list", "data": list(models.values())})
    return {"models": listing} | {f"models/{name}": encode(model) for name, model in models.items()}
