"""The service's own format: a prompt in; a text, or a stream of `token` events, out."""

import re
from typing import Annotated, Any, Literal

import msgspec

from gateway.errors import MultimodalUnsupported, RequestMalformed, ServiceError
from gateway.inference.formats.completion import (
    INVALID_BODY,
    KEEP_ALIVE,
    CompletionRequest,
    FullAnswer,
    decode_again,
    encode,
    finish_reason,
    malformed,
    replace_halves,
)
from gateway.inference.provider.chunks import Delta
from gateway.settings.prices import DEFAULT_MODEL, MAX_OUTPUT_TOKENS, Usage


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    model: str = DEFAULT_MODEL
    stream: bool | None = None
    maxTokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_OUTPUT_TOKENS)] = MAX_OUTPUT_TOKENS
    reasoningEffort: Literal["low", "medium", "high"] | msgspec.UnsetType = msgspec.UNSET


HALF_PAIR = (
    "The body contains half of a surrogate pair, which `slice` leaves where it cuts an emoji in two; "
    "in JavaScript, `text.toWellFormed()` replaces it."
)
KNOWN_FIELDS = ", ".join(f"`{name}`" for name in Prompt.__struct_fields__)
_decode = msgspec.json.Decoder(Prompt).decode
_MEDIA = re.compile(r"(input_?)?((image|audio|video|file|attachment)s?|media)(_?(urls?|data|ids?|b(ase)?64))?", re.I)


def read_completion_request(body: bytes, wants_stream: bool) -> CompletionRequest:
    """Decodes the body, or raises its fault. `wants_stream` decides about streaming if the body does not."""
    try:
        prompt = _decode(body)
    except INVALID_BODY:
        if replace_halves(body) != body:
            raise RequestMalformed(HALF_PAIR) from None
        prompt = decode_again(body, Prompt, _fault)
    effort = {} if prompt.reasoningEffort is msgspec.UNSET else {"reasoning_effort": prompt.reasoningEffort}
    return CompletionRequest(
        model=prompt.model,
        max_tokens=prompt.maxTokens,
        text_bytes=len(prompt.prompt.encode()),
        stream=wants_stream if prompt.stream is None else prompt.stream,
        payload=encode(
            {
                "model": prompt.model,
                "messages": [{"role": "user", "content": prompt.prompt}],
                "max_tokens": prompt.maxTokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                **effort,
            }
        ),
        make_format=_make_format,
    )


def _fault(fields: Any, error: Exception) -> ServiceError:
    """Returns whether the fields of a refused body are multimodal or malformed."""
    if isinstance(fields, dict):
        prompt = fields.get("prompt")
        parts = prompt if isinstance(prompt, list) else [prompt]
        if any(_MEDIA.fullmatch(name) for name in fields) or any(
            isinstance(part, dict) and part.get("type", "text") != "text" for part in parts
        ):
            return MultimodalUnsupported()
        if fields.keys() - set(Prompt.__struct_fields__):
            return RequestMalformed(f"The body contains an unknown field. The known fields are {KNOWN_FIELDS}.")
    return malformed(error, Prompt)


class Native:
    names_refusals = False

    def name_model(self, model: str) -> None:
        """Does nothing: this format names the model at the end."""

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def chunks(self, deltas: list[Delta]) -> bytes:
        return b"".join(
            [b'data: {"token":%b}\n\n' % encode(text) for delta in deltas if (text := delta.content or delta.refusal)]
        )

    def texts(self, texts: list[bytes]) -> bytes:
        return b'data: {"token":%b}\n\n' % b'}\n\ndata: {"token":'.join(texts)

    def end(self, model: str, finish: str | None, usage: Usage | None) -> bytes:
        return b"event: done\ndata: %b\n\n" % encode(
            {"model": model, "finishReason": finish_reason(finish), "usage": _usage_fields(usage)}
        )

    def error(self, error: ServiceError) -> bytes:
        return b"event: error\ndata: %b\n\n" % encode({"error": error.event()})

    def full(self, answer: FullAnswer, model: str, finish: str | None, usage: Usage | None) -> bytes:
        return encode(
            {
                "text": answer.text + answer.refusal,
                "model": model,
                "finishReason": finish_reason(finish),
                "usage": _usage_fields(usage),
            }
        )


NATIVE = Native()


def _make_format(_: str, __: str) -> Native:
    return NATIVE


def _usage_fields(usage: Usage | None) -> dict[str, int] | None:
    return None if usage is None else {"inputTokens": usage.input, "outputTokens": usage.output}
