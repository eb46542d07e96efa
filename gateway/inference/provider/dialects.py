"""What providers send in other forms than OpenAI's, and how it is read. docs/providers.md lists all of it.

Only what the plain form does not cover comes here, so it costs the plain form nothing.
"""

import json
import secrets
from typing import Any

import msgspec

from gateway.inference.provider.chunks import CallPart, Choice, Chunk, Delta, FunctionPart

STOP, TOOL_CALLS, BROKEN = "stop", "tool_calls", "error"
# Finish reasons in lower case, by those that clients know; BROKEN stands for an answer that did not end.
_REASONS = {
    STOP: ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "completed"),
    "length": ("length", "max_tokens", "max_output_tokens", "model_length"),
    "content_filter": ("content_filter", "safety", "refusal"),
    TOOL_CALLS: ("tool_calls", "tool_use", "function_call"),
    BROKEN: ("abort", "aborted", "error", "cancelled", "canceled", "insufficient_system_resource"),
}
FINISH = {name: reason for reason, names in _REASONS.items() for name in names}
KEEP_ALIVES = frozenset({b"", b"null", b"ping", b'"ping"'})
_NOTHING = frozenset({b"null", b"false", b"{}", b'""', b"[]"})


def is_given(member: msgspec.Raw) -> bool:
    """Returns whether a member is there and says something."""
    return bool(member) and bytes(member).translate(None, b" \t\r\n") not in _NOTHING


class Calls:
    """Numbers the tool calls of an answer from 0, in the order in which they begin.

    A call begins with a new id, or with a new index of the provider's. Its first part has its id, type, name and
    arguments; the next ones only have arguments, because clients join texts that are repeated.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._named: list[bool] = []
        self._argued: list[bool] = []
        self._numbers: dict[int | None, int] = {}  # by the provider's index: the call that it means now

    def __len__(self) -> int:
        return len(self._ids)

    def number(self, part: CallPart) -> CallPart:
        function = part.function or FunctionPart()
        known = self._numbers.get(part.index, self._numbers.get(None) if part.index is None else None)
        if part.index is None and known is None and self._ids:
            known = len(self._ids) - 1
        begins = known is None or bool(part.id and part.id != self._ids[known])
        number = len(self._ids) if begins or known is None else known
        if begins:
            self._ids.append(part.id or f"call_{secrets.token_hex(12)}")
            self._named.append(False)
            self._argued.append(False)
        self._numbers[part.index] = self._numbers[None] = number
        name = None if self._named[number] else function.name or None
        self._named[number] |= bool(name)
        self._argued[number] |= bool(function.arguments)
        if begins:
            first = FunctionPart(name or "", function.arguments or "")
            return CallPart(number, self._ids[number], "function", first)
        return CallPart(number, None, None, FunctionPart(name, function.arguments or ""))

    def without_arguments(self) -> list[CallPart]:
        """Returns the parts that complete the calls without arguments, which clients parse as JSON.

        Only an answer that the model ended is completed: after `length` or `content_filter` the arguments may be
        missing, and clients would run the call without them.
        """
        return [
            CallPart(number, None, None, FunctionPart(None, "{}"))
            for number, argued in enumerate(self._argued)
            if not argued
        ]


def read_leniently(data: bytes) -> Chunk | None:
    """Reads an event that the decoder refuses. Leaves out members of a wrong type. Returns None if it is not JSON.

    Only `content` may contain halves of surrogate pairs, because the other half may come with the next event.
    """
    try:
        event = json.loads(data)
        return _chunk(event) if isinstance(event, dict) else None
    except (ValueError, RecursionError):  # also of a part that is written as JSON again
        return None


def _chunk(event: dict[str, Any]) -> Chunk:
    choices = event.get("choices")
    return Chunk(
        choices=[_choice(each) for each in choices if isinstance(each, dict)] if isinstance(choices, list) else None,
        model=_text(event.get("model")),
        usage=_raw(event.get("usage")),
        error=_raw(event.get("error")),
    )


def _choice(choice: dict[str, Any]) -> Choice:
    delta, message = choice.get("delta"), choice.get("message")
    return Choice(
        delta=_delta(delta) if isinstance(delta, dict) else None,
        finish_reason=_text(choice.get("finish_reason")),
        index=_number(choice.get("index")),
        message=_delta(message) if isinstance(message, dict) else None,
        error=_raw(choice.get("error")),
    )


def _delta(delta: dict[str, Any]) -> Delta:
    content, calls, function = delta.get("content"), delta.get("tool_calls"), delta.get("function_call")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    return Delta(
        content=content if isinstance(content, str) else None,
        reasoning=_text(delta.get("reasoning")),
        reasoning_content=_text(delta.get("reasoning_content")),
        refusal=_text(delta.get("refusal")),
        tool_calls=[_call(each) for each in calls if isinstance(each, dict)] if isinstance(calls, list) else None,
        function_call=_function(function) if isinstance(function, dict) else None,
    )


def _call(call: dict[str, Any]) -> CallPart:
    call_id, function = call.get("id"), call.get("function")
    return CallPart(
        index=_number(call.get("index")),
        id=join_surrogates(str(call_id)) if isinstance(call_id, str | int) else None,
        function=_function(function) if isinstance(function, dict) else None,
    )


def _function(function: dict[str, Any]) -> FunctionPart:
    arguments = function.get("arguments")
    if isinstance(arguments, dict | list):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return FunctionPart(name=_text(function.get("name")), arguments=_text(arguments))


def _text(value: Any) -> str | None:
    return join_surrogates(value) if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and value == value // 1 else None


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw() if value is None else msgspec.Raw(json.dumps(value).encode())


def join_surrogates(text: str) -> str:
    """Returns the text with pairs of surrogates as one character, and single halves as U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def is_first_half(character: str) -> bool:
    return "\ud800" <= character <= "\udbff"
