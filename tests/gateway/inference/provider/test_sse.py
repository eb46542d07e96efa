"""The reader of server-sent events, on bytes alone. It does not matter how the network splits them.

test_dialects.py has the ways in which providers write an answer.
"""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.errors import ProviderFailed, ServiceError
from gateway.inference.formats.completion import Format, FullAnswer
from gateway.inference.formats.native import NATIVE
from gateway.inference.formats.openai import OpenAI
from gateway.inference.provider.chunks import Delta
from gateway.inference.provider.errors import ProviderSignal
from gateway.inference.provider.sse import EVENT_BYTES, AnswerReader
from gateway.settings.prices import Usage
from tests.gateway.inference.provider.events import DONE, event, token
from tests.support.selection import with_more_in_test_all


def read(*parts: bytes, together: bool = False, kind: type[AnswerReader] = AnswerReader) -> tuple[str, AnswerReader]:
    """Reads after each part, or once after all of them if `together`."""
    reader = kind([])
    deltas = []
    for part in parts:
        reader.received.append(part)
        if not together:
            deltas += reader.read()
    reader.eof = True
    deltas += reader.read()
    return "".join(delta.content or "" for delta in deltas), reader


@with_more_in_test_all("examples", 40, 200)
def test_any_cut_gives_the_same_text(examples: int) -> None:
    @given(
        st.data(), st.lists(st.text(max_size=20), max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.booleans()
    )
    @settings(max_examples=examples)
    def check(data: st.DataObject, texts: list[str], newline: bytes, together: bool) -> None:
        body = b": hello\n\n" + b"".join(token(t) for t in texts)
        body += b"event: ping\nid: 7\nretry: 5\n\n" + token(None, "length")
        body += event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4}) + DONE
        body = body.replace(b"\n", newline)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
        parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) if a != b]
        text, reader = read(*parts, together=together)
        assert (text, reader.failure, reader.complete) == ("".join(texts), None, True)
        assert (reader.finish, reader.usage, reader.model) == ("length", Usage(3, 4), "m")
        assert reader.signal is ProviderSignal.COMPLETION
        assert reader.produced == sum(map(len, texts))
        assert reader.unread == 0

    check()


def read_in_frames(parts: list[bytes]) -> tuple[str, AnswerReader]:
    """Reads like `read`, with events in the answer's frame passed on unchanged."""
    reader = AnswerReader([])
    text = ""
    for part in parts:
        reader.received.append(part)
        texts = reader.read_texts()
        text += "".join(map(json.loads, texts) if texts is not None else (d.content or "" for d in reader.read()))
    reader.eof = True
    text += "".join(delta.content or "" for delta in reader.read())
    return text, reader


def outcome(reader: AnswerReader) -> tuple[object, ...]:
    failure = reader.failure and type(reader.failure)
    return failure, reader.signal, reader.complete, reader.finish, reader.usage, reader.model, reader.produced


def framed(literal: str, usage: str = "null", more: str = "") -> bytes:
    delta = f'{{"content":{literal}{more}}}'
    return f'data: {{"id":"x","model":"m","choices":[{{"delta":{delta}}}],"usage":{usage}}}\n\n'.encode(
        errors="surrogatepass"
    )


LITERALS = st.one_of(
    st.text(max_size=8).map(json.dumps),
    st.text(max_size=8).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(
        ['"a"', '""', "null", '"content"', '"x"', '"\\"', '"a\nb"', ' "a"', '"\\ud800"', '"a","content":"b"', '"\x00"']
    ),
)
EVENTS = st.one_of(
    LITERALS.map(framed),
    LITERALS.map(framed),
    st.builds(
        framed,
        LITERALS,
        usage=st.sampled_from(["null", '{"prompt_tokens":1,"completion_tokens":2}']),
        more=st.sampled_from(
            ["", ',"reasoning":"r"', ',"tool_calls":[{"index":0}]', '},"finish_reason":"stop","x":{"a":1']
        ),
    ),
    st.sampled_from([DONE, b": hello\n\n", b"data: {]\n\n", b'data: {"error":{"code":"x"}}\n\n']),
)


@with_more_in_test_all("examples", 40, 400)
def test_a_frame_does_not_change_the_text(examples: int) -> None:
    @given(st.lists(EVENTS, max_size=12))
    @example([framed(literal) for literal in ('"a"', '"b"', '"\\ud800"', '"c"')])  # half of a surrogate pair is held
    @settings(max_examples=examples)
    def check(events: list[bytes]) -> None:
        text, reader = read(*events)
        assert read_in_frames(events)[0] == text
        assert outcome(read_in_frames(events)[1]) == outcome(reader)
        together = [b"".join(events)]
        assert read_in_frames(together)[0] == text

    check()


UNREADABLE = {
    "not an object": b"data: [1]\n\n",
    "not UTF-8": b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n',
    "nested too deeply": b'data: {"choices":[{"delta":{"tool_calls":%b}}]}\n\n' % (b"[" * 100_000),
    "a long event": b'data: "' + b"x" * EVENT_BYTES + b'"\n\n',
    "a long event without an end": b"x" * (EVENT_BYTES + 1),
}


@pytest.mark.parametrize("begun", [False, True], ids=["at once", "after a token"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_a_failure_of_the_provider(name: str, begun: bool) -> None:
    _, reader = read(*([token("a")] if begun else []), UNREADABLE[name], DONE)
    assert (type(reader.failure), reader.signal) == (ProviderFailed, ProviderSignal.FAILED)
    _, reader = read(token("a", "stop"), UNREADABLE[name])
    assert (reader.failure, reader.complete) == (None, True), "the answer was complete"


HALF = "\udc00"


def encode_everywhere(deltas: list[Delta], reader: AnswerReader) -> None:
    """Encodes all that clients of both formats get, as streams and as whole answers."""
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    text, reasoning, refusal = (
        "".join(getattr(delta, name) or "" for delta in deltas) for name in ("content", "reasoning_content", "refusal")
    )
    formats: list[Format] = [NATIVE, OpenAI("id", "m", with_usage=True)]
    for format in formats:
        stream = format.chunks(deltas) + format.end("m", reader.finish, reader.usage)
        whole = format.full(FullAnswer(text, reasoning, calls, refusal), "m", reader.finish, reader.usage)
        assert (stream + whole).decode()


class Crashing(AnswerReader):
    def _read_finish(self, *_: object) -> None:
        raise UnicodeError("Mandarine ardoise")


def test_an_error_of_the_reader_is_a_failure_of_the_provider() -> None:
    """Before a token it costs nothing, and the request may go to another provider."""
    for begun in (False, True):
        with capture_logs() as logged:
            text, reader = read(*([token("a")] if begun else []), token("b", "stop"), DONE, kind=Crashing)
        assert (type(reader.failure), reader.signal) == (ProviderFailed, ProviderSignal.FAILED)
        assert text == ("ab" if begun else "b"), "what was read before is relayed"
        (line,) = logged
        assert line["event"] == "provider.unreadable"
        assert line["error"].startswith("UnicodeError at ")
        assert "Mandarine" not in str(logged)


STRINGS = st.one_of(
    st.text(st.characters(), max_size=6),
    st.sampled_from([HALF, "\ud83d", "\ud83d\ude00", "\ude00\ud83d", "stop", "null", "abort", "content_filter", ""]),
)
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**63, 2**64, -(2**70), 10**400, 1e300, 0.5, float("nan"), float("inf"), float("-inf")]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, STRINGS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(STRINGS, inner, max_size=3)),
    max_leaves=5,
)


def members(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Returns objects with some of these members, each of its own kind or of any other."""
    optional = {name: st.one_of(kind, kind, VALUES) for name, kind in known.items()}
    return st.fixed_dictionaries({}, optional=optional)


FUNCTIONS = members(name=STRINGS, arguments=STRINGS)
CALLS = members(index=NUMBERS, id=STRINGS, type=STRINGS, function=FUNCTIONS)
DELTAS = members(
    content=st.one_of(STRINGS, st.lists(members(type=STRINGS, text=STRINGS), max_size=2)),
    reasoning=STRINGS,
    reasoning_content=STRINGS,
    refusal=STRINGS,
    tool_calls=st.lists(CALLS, max_size=2),
    function_call=FUNCTIONS,
)
CHOICES = members(index=st.just(0), delta=DELTAS, message=DELTAS, finish_reason=STRINGS, error=VALUES)
USAGES = members(
    prompt_tokens=NUMBERS,
    completion_tokens=NUMBERS,
    prompt_tokens_details=st.dictionaries(STRINGS, NUMBERS, max_size=2),
)
ERRORS = members(message=STRINGS, code=st.one_of(STRINGS, NUMBERS), status=NUMBERS, type=STRINGS)
ANSWERS = members(model=STRINGS, choices=st.lists(CHOICES, max_size=2), usage=USAGES, error=ERRORS, message=STRINGS)


@with_more_in_test_all("examples", 50, 1_000)
def test_whatever_json_a_provider_sends_is_read_or_fails(examples: int) -> None:
    """Nothing that JSON allows crashes the reader, or what encodes its deltas."""

    @given(st.lists(st.tuples(ANSWERS, st.booleans()), max_size=5), st.sampled_from([DONE, b"", b"data: [DONE]\n\n"]))
    @settings(max_examples=examples)
    def check(events: list[tuple[Any, bool]], end: bytes) -> None:
        reader, deltas = AnswerReader([]), []
        with capture_logs() as logged:
            for fields, escaped in events:
                text = json.dumps(fields, ensure_ascii=escaped)
                reader.received.append(b"data: " + text.encode(errors="surrogatepass") + b"\n\n")
                deltas += reader.read()
            reader.received.append(end)
            reader.eof = True
            deltas += reader.read()
        assert logged == []
        assert reader.complete != isinstance(reader.failure, ServiceError)
        encode_everywhere(deltas, reader)

    check()
