"""What providers send (docs/providers.md), and what callers get."""

import json
from typing import Any

DONE = "data: [DONE]\n\n"


def data(event: object) -> str:
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"


def delta(finish: object = None, **members: object) -> str:
    return data({"choices": [{"index": 0, "delta": members, "finish_reason": finish}]})


def usage(*numbers: Any) -> str:
    """Returns a report of the tokens of the prompt and the completion, and perhaps their total."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return data({"choices": [], "usage": dict(zip(names, numbers, strict=False))})


HELLO = delta(content="Hel") + delta(content="lo")
END = delta("stop") + usage(5, 7) + DONE
BROKE, CUT = "broke", "cut"

# What the provider sends, the text, the finish reason (or how it failed), and the usage.
TABLE: dict[str, tuple[str, str, str, tuple[int, int] | None]] = {
    "plain": (HELLO + END, "Hello", "stop", (5, 7)),
    **{
        f"finish {word}": (HELLO + delta(word) + usage(5, 7) + DONE, "Hello", finish, (5, 7))
        for finish, words in {
            "stop": [
                *("stop", "STOP", "eos", "eos_token", "end_turn", "stop_sequence", "completed", "something new"),
                *("tool_calls", "tool_use", "function_call"),  # without a call
            ],
            "length": ["length", "max_tokens", "MAX_TOKENS", "max_output_tokens", "model_length"],
            "content_filter": ["content_filter", "SAFETY", "refusal"],
            BROKE: ["abort", "aborted", "error", "cancelled", "canceled", "insufficient_system_resource"],
        }.items()
        for word in words
    },
    **{
        f"finish {word} after a call": (
            delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}])
            + delta(word)
            + usage(5, 7)
            + DONE,
            "",
            "length" if word == "length" else "tool_calls",
            (5, 7),
        )
        for word in ("stop", "tool_calls", "tool_use", "function_call", "something new", "length")
    },
    "an error in the choice": (
        HELLO + data({"choices": [{"index": 0, "delta": {}, "finish_reason": "error", "error": {"code": 502}}]}) + DONE,
        "Hello",
        BROKE,
        None,
    ),
    "done without a finish reason": (HELLO + usage(5, 7) + DONE, "Hello", CUT, (5, 7)),
    "done alone": (DONE, "", CUT, None),
    "empty finish reasons": (delta("", content="Hello"), "Hello", CUT, None),
    "the word null": (delta("null", content="Hello") + DONE, "Hello", CUT, None),
    "no done": (HELLO + delta("stop") + usage(5, 7), "Hello", "stop", (5, 7)),
    "done with blanks": (HELLO + delta("stop") + usage(5, 7) + "data:  [DONE] \n\n", "Hello", "stop", (5, 7)),
    "garbage after the end": (HELLO + delta("stop") + usage(5, 7) + "data: <eof>\n\n", "Hello", "stop", (5, 7)),
    "an error after the end": (HELLO + delta("stop") + data({"error": {"code": 500}}) + DONE, "Hello", "stop", None),
    "text after the end": (HELLO + delta("stop") + HELLO + usage(5, 7) + DONE, "Hello", "stop", (5, 7)),
    "empty usage after a good one": (HELLO + delta("stop") + usage(5, 7) + usage() + DONE, "Hello", "stop", (5, 7)),
    "nulls after a good one": (HELLO + delta("stop") + usage(5, 7) + usage(None, None) + DONE, "Hello", "stop", (5, 7)),
    "zeros after a good one": (HELLO + delta("stop") + usage(5, 7) + usage(0, 0) + DONE, "Hello", "stop", (5, 7)),
    "whole floats": (HELLO + delta("stop") + usage(5.0, 7.0) + DONE, "Hello", "stop", (5, 7)),
    "half tokens": (HELLO + delta("stop") + usage(5.5, 7) + DONE, "Hello", "stop", None),
    **{
        f"{completion} tokens and a total of {total}": (
            HELLO + delta("stop") + usage(5, completion, total) + DONE,
            "Hello",
            "stop",
            reported,
        )
        for completion, total, reported in (
            (7, 12, (5, 7)),
            (2, 14, (5, 9)),
            (0, 14, (5, 9)),
            (2, 14.0, (5, 9)),
            (7, 3, (5, 7)),
            (7, -3, (5, 7)),
            (7, 14.5, (5, 7)),
            (7, None, (5, 7)),
            (7, "14", (5, 7)),
            (-2, 14, None),
        )
    },
    "keep-alives": (
        "data: \n\ndata:\n\ndata: null\n\n" + HELLO + "event: ping\ndata: ping\n\ndata: ping\n\n: x\n\n" + END,
        "Hello",
        "stop",
        (5, 7),
    ),
    "a ping with data": ('event: ping\ndata: {"type": "ping"}\n\n' + HELLO + END, "Hello", "stop", (5, 7)),
    **{
        f"the error {empty}": (
            data(f'{{"error": {empty}, "choices": [{{"delta": {{"content": "Hello"}}}}]}}') + END,
            "Hello",
            "stop",
            (5, 7),
        )
        for empty in ("{}", "false", '""', "null")
    },
    "no message": (data({"message": None}) + HELLO + END, "Hello", "stop", (5, 7)),
    "content as parts": (delta(content=[{"type": "text", "text": "Hello"}]) + END, "Hello", "stop", (5, 7)),
    "a number that is none": (
        data('{"choices":[{"delta":{"content":"Hello"}}],"x":NaN}') + END,
        "Hello",
        "stop",
        (5, 7),
    ),
    "a split pair": (
        data('{"choices":[{"delta":{"content":"a\\ud83d"}}]}')
        + data('{"choices":[{"delta":{"content":"\\ude00b"}}]}')
        + END,
        "a😀b",
        "stop",
        (5, 7),
    ),
    "half a pair": (data('{"choices":[{"delta":{"content":"a\\ud83d"}}]}') + END, "a\ufffd", "stop", (5, 7)),
    "half a pair before text": (
        data('{"choices":[{"delta":{"content":"a\\ud83d"}}]}') + delta(content="b") + END,
        "a\ufffdb",
        "stop",
        (5, 7),
    ),
    "half a pair in a refusal": (
        data('{"choices":[{"delta":{"refusal":"a\\ude00"}}]}') + END,
        "a\ufffd",
        "stop",
        (5, 7),
    ),
    "half a pair in a call": (
        data('{"choices":[{"delta":{"tool_calls":[{"id":"\\ude00","function":{"name":"\\ud83d"}}]}}]}')
        + data('{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"\\ud83d"}}]}}]}')
        + END,
        "",
        "tool_calls",
        (5, 7),
    ),
    "another choice": (
        data({"choices": [{"index": 1, "delta": {"content": "x"}}]}) + HELLO + END,
        "Hello",
        "stop",
        (5, 7),
    ),
    "wrong types": (
        data({"choices": [{"delta": {"content": "Hello", "refusal": 7}}], "model": 3}) + END,
        "Hello",
        "stop",
        (5, 7),
    ),
    "a refusal": (delta(refusal="No.") + END, "No.", "stop", (5, 7)),
    "a whole answer": (
        json.dumps(
            {
                "choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 5, "completion_tokens": 7},
            },
            indent=1,
        ),
        "Hello",
        "stop",
        (5, 7),
    ),
}


def split(sent: str, how: str) -> list[bytes]:
    wire = sent.encode()
    match how:
        case "whole":
            return [wire]
        case "events":
            return [event + b"\n\n" for event in wire.removesuffix(b"\n\n").split(b"\n\n")]
    return [wire[at : at + 1] for at in range(len(wire))]
