"""The browser leaves or stops reading: the request at the provider ends soon, and the cost is right."""

import asyncio
import json
import socket

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, flood, tokens
from tests.fakes.server import HANG, Exchange, Script
from tests.support.accounts import App
from tests.support.metrics import metric
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import cost, max_cost

pytestmark = pytest.mark.asyncio(loop_scope="session")


def request(app: App, prompt: str, stream: bool = True) -> bytes:
    body = json.dumps({"prompt": prompt, "stream": stream}).encode()
    head = f"POST {app.path} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {app.token()}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def connect(app: App, receive_buffer: int = 0) -> socket.socket:
    browser = socket.socket()
    if receive_buffer:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    browser.setblocking(False)
    await asyncio.get_running_loop().sock_connect(browser, ("127.0.0.1", app.gateway.port))
    return browser


async def ask(
    app: App, provider: FakeProvider, prompt: str, *, stream: bool = True, receive_buffer: int = 0
) -> tuple[socket.socket, Exchange]:
    """Sends a request, and returns once the provider has it."""
    browser = await connect(app, receive_buffer)
    await asyncio.get_running_loop().sock_sendall(browser, request(app, prompt, stream))
    return browser, await arrived(provider, prompt)


async def arrived(provider: FakeProvider, prompt: str) -> Exchange:
    return (await wait_until(lambda: provider.asked(prompt)))[0]


async def wait_for_cancellation(asked: Exchange) -> None:
    await asyncio.wait_for(asked.canceled.wait(), PATIENCE_SECONDS)


async def anomalies(app: App) -> float:
    return await metric(app.gateway, 'gateway_usage_anomalies_total{kind="no usage"}')


UNFINISHED: dict[str, Script] = {
    "nothing": [HANG],
    "role": [ROLE, HANG],
    "text": [ROLE, chunk("a"), chunk("b"), HANG],
    "text, and a reset": [ROLE, chunk("a"), HANG],
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("sent", UNFINISHED)
async def test_gone(app: App, provider: FakeProvider, sent: str, stream: bool) -> None:
    """The provider has the request and may bill it: that is an interruption, not a failure.

    It does not count as an answer without usage: that metric describes the provider.
    """
    before = await anomalies(app)
    prompt = provider.plays(UNFINISHED[sent])
    browser, asked = await ask(app, provider, prompt, stream=stream)
    assert (await app.account.spend())["reserved"] == max_cost(prompt)
    if "reset" in sent:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    browser.close()
    await wait_for_cancellation(asked)
    assert await app.account.settled() == max_cost(prompt)
    assert await anomalies(app) == before


async def test_a_complete_answer_without_usage_is_an_anomaly(app: App, provider: FakeProvider) -> None:
    before = await anomalies(app)
    await app.ask(provider.plays(tokens("a", usage=None)))
    assert await anomalies(app) == before + 1


async def test_gone_after_a_long_body_that_came_late(app: App, provider: FakeProvider) -> None:
    """Its last part is more than a connection takes before it pauses."""
    prompt = provider.plays(HANG, prompt="a long prompt " + "x" * 90_000)
    browser, sent = await connect(app), request(app, prompt, False)
    loop, middle = asyncio.get_running_loop(), len(sent) - 85_000
    await loop.sock_sendall(browser, sent[:middle])
    await asyncio.sleep(0.2)
    await loop.sock_sendall(browser, sent[middle:])
    asked = await arrived(provider, prompt)
    browser.close()
    await wait_for_cancellation(asked)


async def test_gone_between_usage_and_the_end(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(ROLE, chunk("a"), chunk(usage=(5, 1)) + chunk("b"), HANG, DONE)
    async with app.stream(prompt) as source:
        events = source.aiter_sse()
        assert [json.loads((await anext(events)).data)["token"] for _ in "ab"] == ["a", "b"]
    assert await app.account.settled() == cost(5, 1)


async def test_a_slow_reader_holds_back_the_provider(app: App, provider: FakeProvider) -> None:
    total = 600 * 65_536
    prompt = provider.plays(flood(600, 65_536))
    gateway = app.gateway
    before = gateway.memory
    browser, asked = await ask(app, provider, prompt, receive_buffer=4096)
    loop = asyncio.get_running_loop()

    async def stalled() -> bool:
        seen = asked.written
        await asyncio.sleep(0.3)
        return seen > 0 and asked.written == seen

    await wait_until(stalled)
    assert asked.written < total / 3, "the kernel's buffers may fill, no more"
    assert gateway.memory - before < 16
    # When it reads again, everything arrives, complete and in order.
    received = bytearray()
    while b"event: done" not in received[-2000:]:
        received += await asyncio.wait_for(loop.sock_recv(browser, 2**18), 5)
    browser.close()
    assert received.count(b"x" * 65_536) == 600
    assert await app.account.settled() == cost(1, 1)


async def test_a_browser_that_leaves_before_its_body_is_complete(
    app: App, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    prompt = provider.plays()
    browser = await connect(app)
    await asyncio.get_running_loop().sock_sendall(browser, request(app, prompt)[:-5])
    await asyncio.sleep(0.1)
    browser.close()
    assert (await app.ask(provider.plays(tokens("x", usage=(1, 1))))).status_code == 200
    assert provider.asked(prompt) == []
    assert await app.account.settled() == cost(1, 1)
