"""The table of what providers send (docs/providers.md): the same text, end and usage, however its bytes are split."""

import json
from typing import Any

import pytest

from gateway.errors import ProviderQuotaExhausted
from gateway.inference.provider.sse import AnswerReader
from gateway.inference.spend.prices import Usage

DONE = "data: [DONE]\n\n"


def data(event: object) -> str:
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"


def delta(finish: object = None, **members: object) -> str:
    return data({"choices": [{"index": 0, "delta": members, "finish_reason": finish}]})


def usage(*numbers: Any) -> str:
    names = ("prompt_tokens", "completion_tokens")
    return data({"choices": [], "usage": dict(zip(names, numbers, strict=True)) if numbers else {}})


HELLO = delta(content="Hel") + delta(content="lo")
END = delta("stop") + usage(5, 7) + DONE
BROKE, CUT = "broke", "cut"

# What the provider sends, the text, the finish reason (or how it failed), and the usage.
TABLE: dict[str, tuple[str, str, str, tuple[int, int] | None]] = {
    "plain": (HELLO + END, "Hello", "stop", (5, 7)),
    **{
        f"finish {word}": (HELLO + delta(word) + usage(5, 7) + DONE, "Hello", finish, (5, 7))
        for finish, words in {
            "stop": ["stop", "STOP", "eos", "eos_token", "end_turn", "stop_sequence", "completed", "something new"],
            "length": ["length", "max_tokens", "MAX_TOKENS", "max_output_tokens", "model_length"],
            "content_filter": ["content_filter", "SAFETY", "refusal"],
            "tool_calls": ["tool_calls", "tool_use", "function_call"],
            BROKE: ["abort", "aborted", "error", "cancelled", "canceled", "insufficient_system_resource"],
        }.items()
        for word in words
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


def read(pieces: list[bytes]) -> tuple[AnswerReader, str, list[Any]]:
    received: list[bytes] = []
    reader, text, calls = AnswerReader(received), "", []
    for number, piece in enumerate([*pieces, b""]):
        received.append(piece)
        reader.eof = number == len(pieces)
        if (texts := reader.read_texts()) is not None:
            text += "".join(map(json.loads, texts))
            continue
        for each in reader.read():
            text += each.content or each.refusal or ""
            calls += each.tool_calls or []
    return reader, text, calls


def split(sent: str, how: str) -> list[bytes]:
    wire = sent.encode()
    match how:
        case "whole":
            return [wire]
        case "events":
            return [event + b"\n\n" for event in wire.removesuffix(b"\n\n").split(b"\n\n")]
    return [wire[at : at + 1] for at in range(len(wire))]


@pytest.mark.parametrize("how", ["whole", "events", "bytes"])
@pytest.mark.parametrize("name", TABLE)
def test_what_providers_send(name: str, how: str) -> None:
    sent, text, finish, reported = TABLE[name]
    reader, received, _ = read(split(sent, how))
    assert received == text
    assert reader.usage == (Usage(*reported) if reported else None)
    assert reader.complete == (finish not in (BROKE, CUT))
    if reader.complete:
        assert reader.finish == finish
    assert reader.unknown_finish == (name == "finish something new")


def call(**members: Any) -> str:
    return delta(tool_calls=[members])


F, G = {"name": "f", "arguments": ""}, {"name": "g", "arguments": ""}
CALLS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "plain": (
        call(index=0, id="a", type="function", function=F)
        + call(index=0, function={"arguments": '{"x"'})
        + call(index=0, function={"arguments": ":1}"}),
        [("f", '{"x":1}')],
    ),
    "no index": (
        call(id="a", function={"name": "f", "arguments": '{"x"'}) + call(function={"arguments": ":1}"}),
        [("f", '{"x":1}')],
    ),
    "from 1": (call(index=1, id="a", function=F) + call(index=2, id="b", function=G), [("f", "{}"), ("g", "{}")]),
    "one index for two calls": (
        call(index=0, id="a", function={"name": "f", "arguments": "[1]"})
        + call(index=0, id="b", function={"name": "g", "arguments": "[2]"}),
        [("f", "[1]"), ("g", "[2]")],
    ),
    "the id in each part": (
        call(index=0, id="a", function={"name": "f", "arguments": "["})
        + call(index=0, id="a", function={"name": "f", "arguments": "]"}),
        [("f", "[]")],
    ),
    "in turn": (
        call(index=0, id="a", function=F)
        + call(index=1, id="b", function=G)
        + call(index=0, function={"arguments": "1"})
        + call(index=1, function={"arguments": "2"}),
        [("f", "1"), ("g", "2")],
    ),
    "no arguments": (call(index=0, id="a", function={"name": "f"}), [("f", "{}")]),
    "null arguments": (call(index=0, id="a", function={"name": "f", "arguments": None}), [("f", "{}")]),
    "an object": (call(index=0, id="a", function={"name": "f", "arguments": {"x": 1}}), [("f", '{"x": 1}')]),
    "a number as id": (call(index=0, id=7, function={"name": "f", "arguments": "1"}), [("f", "1")]),
    "no id": (call(index=0, function={"name": "f", "arguments": "1"}), [("f", "1")]),
    "the old form": (
        delta(function_call={"name": "f", "arguments": "["}) + delta(function_call={"arguments": "]"}),
        [("f", "[]")],
    ),
}


@pytest.mark.parametrize("how", ["whole", "events", "bytes"])
@pytest.mark.parametrize("name", CALLS)
def test_tool_calls(name: str, how: str) -> None:
    sent, expected = CALLS[name]
    reader, _, parts = read(split(sent + END, how))
    assert (reader.complete, reader.finish, reader.usage) == (True, "tool_calls", Usage(5, 7))
    calls: dict[int, dict[str, str]] = {}
    for part in parts:
        if part.index not in calls:
            assert part.index == len(calls), "counted from 0, in order"
            assert part.id
            assert part.type == "function"
            calls[part.index] = {"id": part.id, "name": part.function.name, "arguments": part.function.arguments}
        else:
            assert (part.id, part.type, part.function.name) == (None, None, None), "clients would join them"
            calls[part.index]["arguments"] += part.function.arguments
    assert [(each["name"], each["arguments"]) for each in calls.values()] == expected
    assert len({each["id"] for each in calls.values()}) == len(calls)


def test_a_named_error_event_ends_the_answer() -> None:
    reader, text, _ = read([(HELLO + 'event: error\ndata: {"code": 429, "message": "quota"}\n\n' + END).encode()])
    assert (text, type(reader.failure)) == ("Hello", ProviderQuotaExhausted)


def test_the_details_of_the_usage() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 4}}
    for given, kept in ((details, details), ({"prompt_tokens_details": {"cached_tokens": "3"}}, None)):
        report = data({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7, **given}})
        reader, _, _ = read([(HELLO + delta("stop") + report + DONE).encode()])
        assert reader.usage == Usage(5, 7, kept)
