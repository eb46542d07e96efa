"""The same text, end and usage, however the bytes of an answer are split."""

import json
from typing import Any

import pytest

from gateway.errors import ProviderQuotaExhausted
from gateway.inference.provider.sse import AnswerReader
from gateway.settings.prices import Usage
from tests.gateway.inference.provider.dialect_table import (
    BROKE,
    CUT,
    DONE,
    END,
    HELLO,
    TABLE,
    data,
    delta,
    split,
    usage,
)


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
