"""The provider's request body: what the formats with messages, tools and schemas send, and what of it is priced."""

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from gateway.errors import MultimodalUnsupported, RequestMalformed, ServiceError
from gateway.inference.formats.completion import CompletionRequest, MakeFormat, encode, malformed
from gateway.inference.formats.tools import ToolCall, object_of
from gateway.settings.prices import DEFAULT_MODEL, MAX_OUTPUT_TOKENS, MESSAGE_TOKENS

# What a request may set, by the provider's names.
FORWARDED = (
    "temperature",
    "top_p",
    "stop",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "reasoning_effort",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
)
_NEED_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
PART_TYPES = (
    "only text is supported, in parts of the types `text`, `input_text`, `output_text`, `refusal`, and in messages of "
    "the assistant `thinking`; remove images, audio, video, files and other parts."
)
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""
    thinking: str = ""


def compose(
    messages: list[dict[str, Any]],
    settings: dict[str, Any],
    *,
    model: str | None,
    max_tokens: Iterable[int | None],
    stream: bool,
    make_format: MakeFormat,
) -> CompletionRequest:
    """Returns the request that asks for an answer to the messages.

    `settings`: those of FORWARDED; None for one that is not set. `max_tokens`: limits of the answer, of which the
    smallest holds. Raises RequestMalformed.
    """
    messages = _join_system(messages)
    text_bytes = sum(map(_bytes_of_message, messages))
    if not text_bytes:
        raise RequestMalformed("The messages contain no text.")
    model = DEFAULT_MODEL if model is None else model
    limit = min([*(each for each in max_tokens if each is not None), MAX_OUTPUT_TOKENS])
    request: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": limit,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    unused = () if settings.get("tools") else _NEED_TOOLS
    given = {name: value for name, value in settings.items() if value is not None and name not in unused}
    # The provider may put any of these into the prompt, as it does with a schema, and then bills it.
    given_bytes = sum(len(encode(value)) for value in given.values() if type(value) not in (int, float))
    return CompletionRequest(
        model=model,
        max_tokens=limit,
        text_bytes=text_bytes + MESSAGE_TOKENS * (len(messages) - 1) + given_bytes,
        stream=stream,
        payload=encode(request | given),
        make_format=make_format,
    )


def assistant_message(text: str, reasoning: str, calls: list[ToolCall] | None) -> dict[str, Any]:
    """Returns a message of the assistant, as a client sends it back."""
    sent: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        # Each provider reads one of the two names; vLLM reads another one than it once did.
        sent |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        for call in calls:
            call.function.arguments = object_of(call.function.arguments)  # chat templates parse it
        sent |= {"content": text or None, "tool_calls": calls}
    return sent


def _join_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with all system texts in the first one: chat templates drop or refuse further ones."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    if not texts:
        return messages
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _bytes_of_message(sent: dict[str, Any]) -> int:
    """Returns the priced bytes: the text and the reasoning, and the JSON of tool calls and their ids."""
    calls = sum(len(encode(sent[name])) for name in ("tool_calls", "tool_call_id") if name in sent)
    return len((sent["content"] or "").encode()) + len(sent.get("reasoning", "").encode()) + calls


def join_text(history: str, number: int, content: str | list[Part], field: str = "content") -> str:
    """Returns the text of a message's content. Raises MultimodalUnsupported. `history`: the name of the list."""
    if isinstance(content, str):
        return content
    for place, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise MultimodalUnsupported(f"{history}[{number}].{field}[{place}].type: {PART_TYPES}")
    return "\n".join(part.refusal if part.type == "refusal" else part.text for part in content)


def find_fault(history: str, kind: type, fields: Any, error: Exception) -> ServiceError:
    """Returns why a body is refused: for its first part that is not text, or else for the decoder's error."""
    messages = fields.get(history) if isinstance(fields, dict) else None
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for place, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict) and part.get("type", "text") not in (*TEXT_PARTS, "thinking", "reasoning_text"):
                return MultimodalUnsupported(f"{history}[{number}].content[{place}].type: {PART_TYPES}")
    return malformed(error, kind)
