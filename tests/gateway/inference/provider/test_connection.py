"""Connections that the provider closes, or on which it sends too much. test_connection_states.py has the rest."""

import asyncio

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, joined, tokens
from tests.fakes.server import CLOSE, HANG, Raw, Script
from tests.support.accounts import App
from tests.support.responses import answered

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


SECOND = joined(tokens("stolen"))
STOLEN = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(SECOND), SECOND)
END = b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE)


@pytest.mark.parametrize("late", [[Raw(END + STOLEN)], [Raw(END), 0.02, Raw(STOLEN)]], ids=["at once", "later"])
async def test_a_second_answer_belongs_to_no_request(app: App, provider: FakeProvider, late: Script) -> None:
    first, second = provider.plays(tokens("mine")[:-1], late, HANG), provider.plays(tokens("yours"))
    assert answered(await app.ask(first))["text"] == "mine"
    await asyncio.sleep(0.05)
    for _ in range(3):
        assert answered(await asyncio.wait_for(app.ask(second), 5))["text"] == "yours"


async def test_connections_that_died_while_idle(app: App, provider: FakeProvider) -> None:
    """The provider may close idle connections at any time. The next request uses another one."""
    dying = provider.plays(tokens("x"), Raw(b"0\r\n\r\n"), 0.05, CLOSE)
    await asyncio.gather(*(app.ask(dying, token=app.token(f"u{n}")) for n in range(8)))
    await asyncio.sleep(0.3)
    prompt = provider.plays(tokens("alive"))
    for _ in range(5):
        assert answered(await app.ask(prompt))["text"] == "alive"
    assert len(provider.asked(prompt)) == 5
