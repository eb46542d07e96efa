"""OpenAI's chat-completions format, for unmodified OpenAI SDKs."""

import calendar
import time
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from gateway.errors import MultimodalUnsupported, RequestMalformed, ServiceError
from gateway.inference.formats.completion import (
    INVALID_BODY,
    CompletionRequest,
    FullAnswer,
    decode_again,
    encode,
    finish_reason,
    replace_halves,
)
from gateway.inference.formats.payload import (
    FORWARDED,
    AtLeastOne,
    Part,
    Temperature,
    TopP,
    assistant_message,
    compose,
    find_fault,
    join_text,
)
from gateway.inference.formats.tools import Tool, ToolCall, ToolChoice, join_calls
from gateway.inference.provider.chunks import Delta
from gateway.inference.provider.dialects import TOOL_CALLS
from gateway.settings.prices import PRICED_ON, Usage

Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


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
    temperature: Temperature | None = None
    top_p: TopP | None = None
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


def read_completion_request(body: bytes, wants_stream: bool) -> CompletionRequest:
    """Decodes the body, or raises its fault. Only the body decides about streaming, as in OpenAI's API."""
    try:
        completion = _decode(body)
    except INVALID_BODY:
        completion = decode_again(replace_halves(body), Completion, partial(find_fault, "messages", Completion))
    _refuse_unsupported(completion)
    options = completion.stream_options
    return compose(
        [_message_to_send(number, message) for number, message in enumerate(completion.messages)],
        {name: getattr(completion, name) for name in FORWARDED},
        model=completion.model,
        max_tokens=(completion.max_tokens, completion.max_completion_tokens),
        stream=bool(completion.stream),
        make_format=partial(OpenAI, with_usage=options is not None and bool(options.include_usage)),
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


def _message_to_send(number: int, message: Message) -> dict[str, Any]:
    role = message.role
    if role == "assistant":
        return _assistant_message(number, message)
    if message.content is None:
        raise RequestMalformed(f"messages[{number}].content: must be text or a list, not null.")
    text = join_text("messages", number, message.content)
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
    return assistant_message(join_text("messages", number, content), reasoning, message.tool_calls)


class OpenAI:
    """Encodes one answer, with its id and the model in every chunk."""

    names_refusals = True

    def __init__(self, request_id: str, model: str, *, with_usage: bool) -> None:
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
