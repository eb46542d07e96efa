"""Every dialect of the provider's stream gives the same answer."""

import asyncio
import json

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, event, joined, tokens
from tests.fakes.server import Head, Script
from tests.support.accounts import App
from tests.support.prices import cost
from tests.support.responses import answered, ended, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORDS = ("Gr", "üß", "e, ", "世界", " 👩‍🚀", '"\\\n')
PLAIN = tokens(*WORDS, usage=(7, 6))
BYTES = joined(PLAIN)
# As some servers write: characters as themselves instead of \u escapes.
UTF8 = BYTES.decode().replace("\\u00fc", "ü").replace("\\u00df", "ß").replace("\\u4e16\\u754c", "世界").encode()


def pieces(data: bytes, size: int) -> Script:
    return [data[i : i + size] for i in range(0, len(data), size)]


DIALECTS: dict[str, Script] = {
    "one event a write": PLAIN,
    "all in one write": [BYTES],
    "one byte a write": pieces(BYTES, 1),
    "seven bytes a write": pieces(BYTES, 7),
    "UTF-8 split within characters": pieces(UTF8, 1),
    "CRLF": [BYTES.replace(b"\n", b"\r\n")],
    "CRLF, byte by byte": pieces(BYTES.replace(b"\n", b"\r\n"), 1),
    "comments": [b": ping\n\n", *(s for step in PLAIN for s in (b": OPENROUTER PROCESSING\n\n", step))],
    "comments within events": [BYTES.replace(b"data: ", b": hush\ndata: ")],
    "no space after the colon": [BYTES.replace(b"data: ", b"data:")],
    "event, id and retry fields": [BYTES.replace(b"data: ", b"event: message\nid: 1\nretry: 10\ndata: ")],
    "more blank lines": [BYTES.replace(b"\n\n", b"\n\n\n\n")],
    "a byte order mark": [b"\xef\xbb\xbf" + BYTES],
    "a charset": [Head(200, {"Content-Type": "text/event-stream; charset=utf-8"}), BYTES],
    "a stream that ends by closing": [
        Head(200, {"Content-Type": "text/event-stream", "Content-Length": str(len(BYTES))}),
        *pieces(BYTES, 100),
    ],
    "unknown fields": [BYTES.replace(b'"object"', b'"system_fingerprint": null, "x": [{}], "object"')],
    "nulls": [BYTES.replace(b'"choices"', b'"error": null, "usage": null, "choices"', BYTES.count(b'"choices"') - 1)],
    "an event with neither choices nor usage": [ROLE, event({"object": "ping"}), *PLAIN[1:]],
    "a finish in the event of a token": [
        *PLAIN[: len(WORDS)],
        chunk(WORDS[-1], finish="stop"),
        chunk(usage=(7, 6)),
        DONE,
    ],
    "usage beside the finish": [*PLAIN[: len(WORDS) + 1], chunk(finish="stop", usage=(7, 6)), DONE],
    "null content": [event({"choices": [{"index": 0, "delta": {"content": None}}]}), *PLAIN],
    "text after the end": [*PLAIN, event({"choices": [{"index": 0, "delta": {"content": "ghost"}}]})],
}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_dialects(app: App, provider: FakeProvider, dialect: str) -> None:
    prompt = provider.plays(DIALECTS[dialect])
    whole = answered(await app.ask(prompt))
    events = await app.events(prompt)
    assert whole["text"] == "".join(WORDS)
    assert text_of(events) == "".join(WORDS)
    expected = {
        "model": "gpt-oss-120b",
        "finishReason": "stop",
        "usage": {"inputTokens": 7, "outputTokens": 6},
    }
    assert ended(events) == expected
    assert {k: v for k, v in whole.items() if k != "text"} == expected
    assert await app.account.settled() == 2 * cost(7, 6)


async def test_a_stream_without_the_final_mark(app: App, provider: FakeProvider) -> None:
    """Complete or truncated, the tokens and the money are the same."""
    prompt = provider.plays(PLAIN[:-1])
    events = await app.events(prompt)
    assert text_of(events) == "".join(WORDS)
    assert events[-1].event in ("done", "error")
    assert await app.account.settled() == cost(7, 6)


async def test_an_event_below_the_limit_passes(app: App, provider: FakeProvider) -> None:
    big = "x" * 1_000_000
    prompt = provider.plays(tokens(big))
    assert answered(await app.ask(prompt))["text"] == big
    assert text_of(await app.events(prompt)) == big


async def test_answers_are_not_compressed(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("x" * 10_000))
    for stream in (True, False):
        headers = app.headers(**{"Accept-Encoding": "gzip, br, deflate, zstd"})
        response = await app.post({"prompt": prompt, "stream": stream}, headers=headers)
        assert response.headers.get("Content-Encoding", "identity") == "identity"
    assert provider.asked(prompt)[0].header("accept-encoding") in (None, "identity")


async def test_events_that_arrive_together_are_sent_together(app: App, provider: FakeProvider) -> None:
    """The events of one read are sent in one piece, and an event is never split."""
    gate = asyncio.Event()
    prompt = provider.plays(joined([ROLE, *(chunk(w) for w in "abcdefgh")]), gate, PLAIN[-3:])
    headers = app.headers()
    async with app.gateway.http.stream(
        "POST", app.path, json={"prompt": prompt, "stream": True}, headers=headers
    ) as response:
        first = await anext(response.aiter_raw())
        gate.set()
    events = [json.loads(e.removeprefix("data: ")) for e in first.decode().split("\n\n") if e]
    assert events == [{"token": w} for w in "abcdefgh"]


@pytest.mark.parametrize("begun", [False, True], ids=["at once", "after the beginning"])
async def test_tokens_that_arrive_with_the_end_are_sent_with_the_end(
    app: App, provider: FakeProvider, begun: bool
) -> None:
    """The last tokens and the end are one piece, whether the relay waits or the shortcut is in use."""
    gate = asyncio.Event()
    beginning = [joined([ROLE, *(chunk(w) for w in "abc")]), gate] if begun else [ROLE]
    prompt = provider.plays(*beginning, joined([chunk("y"), chunk("z"), *PLAIN[-3:]]))
    async with app.gateway.http.stream(
        "POST", app.path, json={"prompt": prompt, "stream": True}, headers=app.headers()
    ) as response:
        pieces = response.aiter_raw()
        if begun:
            assert b'{"token":"c"}' in await anext(pieces)
            gate.set()
        last = await anext(pieces)
        assert [piece async for piece in pieces] == []
    *events, end = last.decode().removesuffix("\n\n").split("\n\n")
    assert [json.loads(e.removeprefix("data: ")) for e in events] == [{"token": "y"}, {"token": "z"}]
    assert end.startswith("event: done\n")
