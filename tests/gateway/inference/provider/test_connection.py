"""The connection to the provider: server behavior that HTTP/1.1 allows or forbids."""

import asyncio

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, joined, tokens
from tests.fakes.server import CLOSE, HANG, Head, Raw, Script
from tests.support.accounts import App
from tests.support.prices import cost
from tests.support.responses import answered, ended, refused, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVENTS = {"Content-Type": "text/event-stream"}
BODY = joined(tokens("fine", usage=(2, 1)))
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunks(data: bytes, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n0\r\n%b\r\n" % (len(data), extension, data, trailer)


ALLOWED: dict[str, Script] = {
    "closing after the answer": [Head(200, {**EVENTS, "Connection": "close"}), BODY, Raw(b"0\r\n\r\n"), CLOSE],
    "HTTP/1.0": [Raw(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + BODY), CLOSE],
    "no length, no chunks": [Raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + BODY), CLOSE],
    "continue first": [Raw(b"HTTP/1.1 100 Continue\r\n\r\n"), Raw(CHUNKED + chunks(BODY))],
    "chunk extensions": [Raw(CHUNKED + chunks(BODY, b";name=value"))],
    "trailers": [Raw(CHUNKED + chunks(BODY, trailer=b"X-Checksum: 1\r\n"))],
    "head in two pieces": [Raw(CHUNKED[:30]), 0.05, Raw(CHUNKED[30:] + chunks(BODY))],
    "many headers": [Head(200, {**EVENTS, **{f"X-{n}": "y" * 50 for n in range(100)}}), BODY],
}


@pytest.mark.parametrize("case", ALLOWED)
async def test_allowed(app: App, provider: FakeProvider, case: str) -> None:
    prompt = provider.plays(ALLOWED[case])
    assert answered(await app.ask(prompt))["text"] == "fine"
    events = await app.events(prompt)
    assert (text_of(events), ended(events)["usage"]) == ("fine", {"inputTokens": 2, "outputTokens": 1})
    assert await app.account.settled() == 2 * cost(2, 1)


STOLEN = CHUNKED + chunks(joined(tokens("stolen")))
END = b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE)
LATE: dict[str, Script] = {
    "with the end": [Raw(END + STOLEN)],
    "garbage with the end": [Raw(END + b"garbage")],
    "after the end": [Raw(END), 0.02, Raw(STOLEN)],
    "begun after the end": [Raw(END), 0.02, Raw(STOLEN[:100]), 0.1, Raw(STOLEN[100:])],
}


@pytest.mark.parametrize("late", LATE)
async def test_surplus_bytes_never_become_an_answer(app: App, provider: FakeProvider, late: str) -> None:
    """The next user does not receive a second answer, which belongs to no request."""
    first = provider.plays(tokens("mine")[:-1], LATE[late], HANG)
    second = provider.plays(tokens("yours"))
    response = await app.ask(first)
    if "garbage" in late and response.status_code != 200:
        refused(response, 502, "PROVIDER_ERROR")
    else:
        assert answered(response)["text"] == "mine"
    await asyncio.sleep(0.05)
    for _ in range(3):
        response = await asyncio.wait_for(app.ask(second), 5)
        assert answered(response)["text"] == "yours"


async def test_connections_that_died_while_idle(app: App, provider: FakeProvider) -> None:
    """The provider may close idle connections at any time. The next request uses another one."""
    dying = provider.plays(tokens("x"), Raw(b"0\r\n\r\n"), 0.05, CLOSE)
    await asyncio.gather(*(app.ask(dying, token=app.token(f"u{n}")) for n in range(8)))
    await asyncio.sleep(0.3)
    prompt = provider.plays(tokens("alive"))
    for _ in range(5):
        assert answered(await app.ask(prompt))["text"] == "alive"
    assert len(provider.asked(prompt)) == 5
