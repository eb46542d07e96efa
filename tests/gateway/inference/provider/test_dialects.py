"""What providers send (docs/providers.md), and what is read from it, however its bytes are split."""

import json
from typing import Any

import pytest

from gateway.errors import ProviderQuotaExhausted
from gateway.inference.provider.sse import AnswerReader
from gateway.settings.prices import Usage

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

REPORT = {"prompt_tokens": 5, "completion_tokens": 7}
# Ways to send "Hello", the finish reason "stop" and a usage of 5 and 7 tokens.
HELLOS: dict[str, str] = {
    "plain": HELLO + END,
    "no done": HELLO + delta("stop") + usage(5, 7),
    "done with blanks": HELLO + delta("stop") + usage(5, 7) + "data:  [DONE] \n\n",
    "garbage after the end": HELLO + delta("stop") + usage(5, 7) + "data: <eof>\n\n",
    "text after the end": HELLO + delta("stop") + HELLO + usage(5, 7) + DONE,
    "empty usage after a good one": HELLO + delta("stop") + usage(5, 7) + usage() + DONE,
    "nulls after a good one": HELLO + delta("stop") + usage(5, 7) + usage(None, None) + DONE,
    "zeros after a good one": HELLO + delta("stop") + usage(5, 7) + usage(0, 0) + DONE,
    "whole floats": HELLO + delta("stop") + usage(5.0, 7.0) + DONE,
    "usage beside the finish": HELLO + data({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": REPORT}),
    "keep-alives": "data: \n\ndata:\n\ndata: null\n\n"
    + HELLO
    + "event: ping\ndata: ping\n\ndata: ping\n\n: x\n\n"
    + END,
    "a ping with data": 'event: ping\ndata: {"type": "ping"}\n\n' + HELLO + END,
    "no space after the colon": (HELLO + END).replace("data: ", "data:"),
    "comments within events": (HELLO + END).replace("data: ", ": hush\ndata: "),
    "event, id and retry fields": (HELLO + END).replace("data: ", "event: message\nid: 1\nretry: 10\ndata: "),
    "a byte order mark": "\ufeff" + HELLO + END,
    "a byte order mark before a comment": "\ufeff: hello\n\n" + HELLO + END,
    "events of several lines": (HELLO + END).replace('"choices":', '\ndata: "choices":'),
    "CRLF": (HELLO + END).replace("\n", "\r\n"),
    "CRLF within events": (HELLO + END).replace('"choices":', '\ndata: "choices":').replace("\n", "\r\n"),
    "CR": (HELLO + END).replace("\n", "\r"),
    "a message beside the choices": (HELLO + END).replace('"delta"', '"message": {"content": "Hello"}, "delta"'),
    "a usage of zeros before text": usage(0, 0) + HELLO + END,
    "more blank lines": (HELLO + END).replace("\n\n", "\n\n\n\n"),
    "unknown fields": (HELLO + END).replace('{"choices"', '{"system_fingerprint": null, "x": [{}], "choices"'),
    **{
        f"the error {empty}": data(f'{{"error": {empty}, "choices": [{{"delta": {{"content": "Hello"}}}}]}}') + END
        for empty in ("{}", "{ }", "false", '""', "null")
    },
    "no message": data({"message": None}) + HELLO + END,
    "content as parts": delta(content=[{"type": "text", "text": "Hello"}]) + END,
    "a number that is none": data('{"choices":[{"delta":{"content":"Hello"}}],"x":NaN}') + END,
    "another choice": data({"choices": [{"index": 1, "delta": {"content": "x"}}]}) + HELLO + END,
    "wrong types": data({"choices": [{"delta": {"content": "Hello", "refusal": 7}}], "model": 3}) + END,
    "a whole answer": json.dumps(
        {
            "choices": [{"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}],
            "usage": REPORT,
        },
        indent=1,
    ),
}
# What the provider sends as the text of a delta, in JSON, and the text.
TEXTS: dict[str, tuple[str, str]] = {
    "characters as themselves": ('{"content":"世界 ☀"}', "世界 ☀"),
    "half a pair": ('{"content":"a\\ud83d"}', "a\ufffd"),
    "half a pair in a refusal": ('{"refusal":"a\\ude00"}', "a\ufffd"),
    "a refusal": ('{"refusal":"No."}', "No."),
}
# What the provider sends, the text, the finish reason (or how it failed), and the usage.
TABLE: dict[str, tuple[str, str, str, tuple[int, int] | None]] = {
    **{name: (sent, "Hello", "stop", (5, 7)) for name, sent in HELLOS.items()},
    **{
        name: (data(f'{{"choices":[{{"delta":{sent}}}]}}') + END, text, "stop", (5, 7))
        for name, (sent, text) in TEXTS.items()
    },
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
    "abort before a token": (delta("abort") + usage(5, 7) + DONE, "", BROKE, (5, 7)),
    "empty finish reasons": (delta("", content="Hello"), "Hello", CUT, None),
    "the word null": (delta("null", content="Hello") + DONE, "Hello", CUT, None),
    "a byte order mark later": (
        delta(content="Hello") + "\ufeff" + delta(content="ghost") + END,
        "Hello",
        "stop",
        (5, 7),
    ),
    "no tokens for some text": (HELLO + delta("stop") + usage(5, 0) + DONE, "Hello", "stop", None),
    "no tokens for no text": (delta("stop") + usage(5, 0) + DONE, "", "stop", (5, 0)),
    "reasoning": (delta(reasoning="Hm") + delta("stop") + usage(5, 0) + DONE, "", "stop", None),
    "a refusal of the same length as a text": (
        delta(content="a") + delta(content="b") + delta(refusal="c") + delta(content="d") + END,
        "abcd",
        "stop",
        (5, 7),
    ),
    "a message alone": (data({"message": "overloaded", "code": 500}), "", BROKE, None),
    "an error after the end": (HELLO + delta("stop") + data({"error": {"code": 500}}) + DONE, "Hello", "stop", None),
    "half tokens": (HELLO + delta("stop") + usage(5.5, 7) + DONE, "Hello", "stop", None),
    **{
        f"{completion} tokens and a total of {total}": (
            HELLO + delta("stop") + usage(5, completion, total) + DONE,
            "Hello",
            "stop",
            reported,
        )
        for completion, total, reported in (
            *((7, total, (5, 7)) for total in (12, 3, -3, 14.5, None, "14")),
            *((2, 14, (5, 9)), (0, 14, (5, 9)), (2, 14.0, (5, 9)), (-2, 14, None)),
        )
    },
    "a split pair": (
        data('{"choices":[{"delta":{"content":"a\\ud83d"}}]}')
        + data('{"choices":[{"delta":{"content":"\\ude00b"}}]}')
        + END,
        "a😀b",
        "stop",
        (5, 7),
    ),
    "half a pair before text": (
        data('{"choices":[{"delta":{"content":"a\\ud83d"}}]}') + delta(content="b") + END,
        "a\ufffdb",
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
}


def split(sent: str, how: str) -> list[bytes]:
    wire = sent.encode()
    match how:
        case "whole":
            return [wire]
        case "events":
            return [event + b"\n\n" for event in wire.removesuffix(b"\n\n").split(b"\n\n")]
    return [wire[at : at + 1] for at in range(len(wire))]


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
    assert reader.unknown_finish == ("something new" in name)


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


@pytest.mark.parametrize("finish", ["stop", "tool_calls", "function_call", "length", "content_filter", "error"])
def test_only_a_model_that_ended_has_called_without_arguments(finish: str) -> None:
    """Otherwise they may be missing, and a client would run the call with its defaults."""
    sent = call(index=0, id="a", function={"name": "f", "arguments": '{"x"'}) + call(index=1, id="b", function=G)
    _, _, parts = read([(sent + delta(finish) + usage(5, 7) + DONE).encode()])
    assert [part.function.arguments for part in parts[:2]] == ['{"x"', ""]
    ended = finish in ("stop", "tool_calls", "function_call")
    assert [(part.index, part.function.arguments) for part in parts[2:]] == ([(1, "{}")] if ended else [])


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


@pytest.mark.parametrize(
    ("completion", "total", "reasoning", "inconsistent"),
    [(7, 12, 4, False), (7, 12, 7, False), (7, None, 7, False), (7, 3, 0, False), (2, 8, 3, True), (2, 7, 7, True)],
)
def test_token_counts_that_contradict_each_other(
    completion: int, total: Any, reasoning: int, inconsistent: bool
) -> None:
    counts = {"prompt_tokens": 5, "completion_tokens": completion, "total_tokens": total}
    report = counts | {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    reader, _, _ = read([(HELLO + delta("stop") + data({"choices": [], "usage": report}) + DONE).encode()])
    assert reader.inconsistent_usage == inconsistent
    assert reader.usage
    assert reader.usage.output == max(completion, (total or 0) - 5)


def test_the_details_of_the_usage() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 4}}
    for given, kept in ((details, details), ({"prompt_tokens_details": {"cached_tokens": "3"}}, None)):
        report = data({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7, **given}})
        reader, _, _ = read([(HELLO + delta("stop") + report + DONE).encode()])
        assert reader.usage == Usage(5, 7, kept)
