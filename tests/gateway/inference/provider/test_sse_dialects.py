"""How the gateway passes on what arrives: large events, and events that arrive together."""

import asyncio
import json

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import ROLE, chunk, joined, tokens
from tests.support.accounts import App

pytestmark = pytest.mark.asyncio(loop_scope="session")

PLAIN = tokens("a", "b", "c")


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
