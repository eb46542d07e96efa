"""The two formats inference is asked in: our own, and the OpenAI chat-completions one.

A Door turns a body into an Ask, and what the provider streams into bytes of its format. Both doors lead to the same
admission and the same relay (inference.py).
"""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal, Protocol

import msgspec

from gateway.errors import ModelNotAllowed, MultimodalUnsupported, RequestMalformed, ServiceError
from gateway.inference.prices import DEFAULT_MODEL, MAX_OUTPUT_TOKENS, MESSAGE_TOKENS, PRICES, Usage
from gateway.inference.provider import Choice

_encode = msgspec.json.Encoder().encode
_BAD = (msgspec.MsgspecError, ValueError, RecursionError)


class Ask(msgspec.Struct, frozen=True):
    """A request that may be sent to the provider."""

    model: str
    max_tokens: int
    text_bytes: int  # what is priced: UTF-8 bytes, and the allowance for further messages
    stream: bool
    payload: bytes  # the provider's request body
    with_usage: bool = True


class Door(Protocol):
    @property
    def keep_alive(self) -> bytes: ...

    def chunks(self, choices: list[Choice]) -> bytes: ...

    def end(self, model: str, finish: str, usage: Usage | None) -> bytes: ...

    def error(self, error: ServiceError) -> bytes: ...

    def whole(self, text: str, reasoning: str, model: str, finish: str, usage: Usage | None) -> bytes: ...


def finish_reason(finish: str | None) -> str:
    return finish if finish in ("length", "content_filter") else "stop"


def _model(model: str) -> str:
    if model not in PRICES:
        raise ModelNotAllowed(f"Choose one of the models offered here: {', '.join(PRICES)}.")
    return model


# -- our own format ------------------------------------------------------------------------------------------


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    model: str = DEFAULT_MODEL
    stream: bool | None = None
    maxTokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_OUTPUT_TOKENS)] = MAX_OUTPUT_TOKENS


_prompt = msgspec.json.Decoder(Prompt)
_MEDIA = re.compile(r"(input_?)?(images?|audios?|videos?|files?|attachments?|media)(_?(urls?|data|ids?))?", re.I)


def native_ask(body: bytes, wants_stream: bool) -> Ask:
    try:
        asked = _prompt.decode(body)
    except _BAD as error:
        raise _native_fault(body, error) from None
    return Ask(
        model=_model(asked.model),
        max_tokens=asked.maxTokens,
        text_bytes=len(asked.prompt.encode()),
        stream=wants_stream if asked.stream is None else asked.stream,
        payload=_encode(
            {
                "model": asked.model,
                "messages": [{"role": "user", "content": asked.prompt}],
                "max_tokens": asked.maxTokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ),
    )


def _native_fault(body: bytes, error: Exception) -> ServiceError:
    """Only here is the body looked at a second time: was it multimodal, or just wrong?"""
    try:
        asked = msgspec.json.decode(body)
    except _BAD:
        return RequestMalformed("The body is not valid JSON in UTF-8.")
    if isinstance(asked, dict):
        prompt = asked.get("prompt")
        parts = prompt if isinstance(prompt, list) else [prompt]
        if any(_MEDIA.fullmatch(name) for name in asked) or any(
            isinstance(part, dict) and part.get("type", "text") != "text" for part in parts
        ):
            return MultimodalUnsupported()
    return RequestMalformed(_reason(error))


def _reason(error: Exception) -> str:
    """msgspec names the field and the type it expected, never the value."""
    reason = str(error) if isinstance(error, msgspec.ValidationError) else "The body is not valid JSON in UTF-8"
    return reason.rstrip(".") + "."


class Native:
    keep_alive = b": keep-alive\n\n"

    def chunks(self, choices: list[Choice]) -> bytes:
        return b"".join(
            [
                b'data: {"token":%b}\n\n' % _encode(choice.delta.content)
                for choice in choices
                if choice.delta is not None and choice.delta.content
            ]
        )

    def end(self, model: str, finish: str, usage: Usage | None) -> bytes:
        return b"event: done\ndata: %b\n\n" % _encode(
            {"model": model, "finishReason": finish, "usage": self._usage(usage)}
        )

    def error(self, error: ServiceError) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encode({"error": error.event()})

    def whole(self, text: str, reasoning: str, model: str, finish: str, usage: Usage | None) -> bytes:
        return _encode({"text": text, "model": model, "finishReason": finish, "usage": self._usage(usage)})

    @staticmethod
    def _usage(usage: Usage | None) -> dict[str, int] | None:
        return None if usage is None else {"inputTokens": usage.input, "outputTokens": usage.output}


NATIVE = Native()


# -- the OpenAI format ---------------------------------------------------------------------------------------

Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class Part(msgspec.Struct):
    type: str
    text: str = ""


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


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
    seed: int | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    reasoning_effort: str | None = None
    response_format: dict[str, Any] | None = None
    n: AtLeastOne | None = None
    tools: Any = None
    functions: Any = None
    logprobs: Any = None
    audio: Any = None
    modalities: list[str] | None = None


_completion = msgspec.json.Decoder(Completion)
PASSED_ON = (
    "temperature",
    "top_p",
    "stop",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "reasoning_effort",
    "response_format",
)


def openai_ask(body: bytes, wants_stream: bool) -> Ask:
    try:
        asked = _completion.decode(body)
    except _BAD as error:
        raise _openai_fault(body, error) from None
    if asked.audio or any(kind != "text" for kind in asked.modalities or ()):
        raise MultimodalUnsupported
    for name in ("tools", "functions", "logprobs"):
        if getattr(asked, name):
            raise RequestMalformed(f"`{name}` is not supported here; leave it out.")
    if asked.n is not None and asked.n > 1:
        raise RequestMalformed("`n` above 1 is not supported here; ask several times.")
    messages = [
        # Some deployments do not know the newer name of the same role.
        {"role": "system" if m.role == "developer" else m.role, "content": _text(m.content)}
        for m in asked.messages
    ]
    text = sum(len(m["content"].encode()) for m in messages)
    if not text:
        raise RequestMalformed("The messages hold no text.")
    model = _model(asked.model or DEFAULT_MODEL)
    limits = [m for m in (asked.max_tokens, asked.max_completion_tokens) if m is not None]
    max_tokens = min([*limits, MAX_OUTPUT_TOKENS])
    request: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for name in PASSED_ON:
        if (value := getattr(asked, name)) is not None:
            request[name] = value
    return Ask(
        model=model,
        max_tokens=max_tokens,
        text_bytes=text + MESSAGE_TOKENS * (len(messages) - 1),
        stream=bool(asked.stream),
        payload=_encode(request),
        with_usage=asked.stream_options is not None and bool(asked.stream_options.include_usage),
    )


def _text(content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    if any(part.type not in ("text", "input_text") for part in content):
        raise MultimodalUnsupported
    return "\n".join(part.text for part in content)


def _openai_fault(body: bytes, error: Exception) -> ServiceError:
    try:
        asked = msgspec.json.decode(body)
        messages = asked.get("messages") if isinstance(asked, dict) else None
        for message in messages if isinstance(messages, list) else []:
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else []:
                if isinstance(part, dict) and part.get("type", "text") not in (
                    "text",
                    "input_text",
                    "refusal",
                ):
                    return MultimodalUnsupported()
    except _BAD:
        return RequestMalformed("The body is not valid JSON in UTF-8.")
    return RequestMalformed(_reason(error))


class OpenAI:
    def __init__(self, request_id: str, model: str, with_usage: bool) -> None:
        self._head = _encode(
            {
                "id": f"chatcmpl-{request_id}",
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": model,
            }
        )[:-1]
        self._with_usage = with_usage
        self._first = True

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

    def chunks(self, choices: list[Choice]) -> bytes:
        out = []
        for choice in choices:
            delta = choice.delta
            if delta is None:
                continue
            if reasoning := delta.reasoning_content or delta.reasoning:
                out.append(self._chunk(b'{"reasoning_content":%b}' % _encode(reasoning)))
            if delta.content:
                out.append(self._chunk(b'{"content":%b}' % _encode(delta.content)))
        return b"".join(out)

    def end(self, model: str, finish: str, usage: Usage | None) -> bytes:
        out = self._chunk(b"{}", _encode(finish))
        if self._with_usage:
            out += b'data: %b,"choices":[],"usage":%b}\n\n' % (self._head, _encode(self._usage(usage)))
        return out + b"data: [DONE]\n\n"

    def error(self, error: ServiceError) -> bytes:
        return b"data: %b\n\n" % _encode({"error": error.event()})

    def whole(self, text: str, reasoning: str, model: str, finish: str, usage: Usage | None) -> bytes:
        message = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        return self._head.replace(b"chat.completion.chunk", b"chat.completion", 1) + b',"choices":[%b],"usage":%b}' % (
            _encode({"index": 0, "message": message, "logprobs": None, "finish_reason": finish}),
            _encode(self._usage(usage)),
        )

    @staticmethod
    def _usage(usage: Usage | None) -> dict[str, int] | None:
        if usage is None:
            return None
        return {
            "prompt_tokens": usage.input,
            "completion_tokens": usage.output,
            "total_tokens": usage.input + usage.output,
        }
