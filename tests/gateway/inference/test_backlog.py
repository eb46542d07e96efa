"""Clients that leave or read slowly.

The request at the provider ends soon, and its cost is right. An answer that is not read holds a limited amount of
memory, and no permit at the provider.
"""

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator

import pytest

from gateway.inference.backlog import ANSWER_BYTES, PIECE_BYTES, Backlog, Backlogs
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, flood, tokens
from tests.fakes.server import HANG, Exchange, Script
from tests.support.accounts import App
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.metrics import metric
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import cost, max_cost
from tests.support.raw_http import bearer, request

session = pytest.mark.asyncio(loop_scope="session")


def make_request(app: App, prompt: str, stream: bool = True) -> bytes:
    body = json.dumps({"prompt": prompt, "stream": stream}).encode()
    return request(app.path, body, bearer(app), "Connection: close")


async def send(app: App, data: bytes) -> socket.socket:
    """Sends bytes to the gateway, and reads nothing.

    It uses the gateway's Unix socket if there is one: the kernel buffers a small, fixed amount there, unlike for TCP.
    """
    path = app.gateway.environment.get("GATEWAY_UPSTREAM", "").removeprefix("unix/")
    client = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, path or ("127.0.0.1", app.gateway.port))
    await loop.sock_sendall(client, data)
    return client


async def receive(client: socket.socket, end: bytes = b"") -> bytes:
    """Returns what arrives until `end` is in it, or the connection closes."""
    received = bytearray()
    loop = asyncio.get_running_loop()
    while not (end and end in received):
        data = await asyncio.wait_for(loop.sock_recv(client, 65_536), 10)
        if not data:
            break
        received += data
    client.close()
    return bytes(received)


# -- clients that leave ----------------------------------------------------------------------------------------


async def wait_for_arrival(provider: FakeProvider, prompt: str) -> Exchange:
    return (await wait_until(lambda: provider.asked(prompt)))[0]


async def anomalies(app: App) -> float:
    return await metric(app.gateway, 'gateway_usage_anomalies_total{kind="no usage"}')


UNFINISHED: dict[str, Script] = {
    "nothing": [HANG],
    "role": [ROLE, HANG],
    "text": [ROLE, chunk("a"), chunk("b"), HANG],
    "text, and a reset": [ROLE, chunk("a"), HANG],
}


@session
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("sent", UNFINISHED)
async def test_gone(app: App, provider: FakeProvider, sent: str, stream: bool) -> None:
    """The provider has the request and may bill it: that is an interruption, not a failure.

    It does not count as an answer without usage: that metric describes the provider.
    """
    before = await anomalies(app)
    prompt = provider.plays(UNFINISHED[sent])
    browser = await send(app, make_request(app, prompt, stream))
    asked = await wait_for_arrival(provider, prompt)
    assert (await app.account.spend())["reserved"] == max_cost(prompt)
    if "reset" in sent:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    browser.close()
    await asyncio.wait_for(asked.canceled.wait(), PATIENCE_SECONDS)
    assert await app.account.settled() == max_cost(prompt)
    assert await anomalies(app) == before


@session
async def test_a_complete_answer_without_usage_is_an_anomaly(app: App, provider: FakeProvider) -> None:
    before = await anomalies(app)
    await app.ask(provider.plays(tokens("a", usage=None)))
    assert await anomalies(app) == before + 1


@session
async def test_gone_after_a_long_body_that_came_late(app: App, provider: FakeProvider) -> None:
    """Its last part is more than a connection takes before it pauses."""
    prompt = provider.plays(HANG, prompt="a long prompt " + "x" * 90_000)
    data = make_request(app, prompt, stream=False)
    browser = await send(app, data[:-85_000])
    await asyncio.sleep(0.2)
    await asyncio.get_running_loop().sock_sendall(browser, data[-85_000:])
    asked = await wait_for_arrival(provider, prompt)
    browser.close()
    await asyncio.wait_for(asked.canceled.wait(), PATIENCE_SECONDS)


@session
async def test_gone_between_usage_and_the_end(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(ROLE, chunk("a"), chunk(usage=(5, 1)) + chunk("b"), HANG, DONE)
    async with app.stream(prompt) as source:
        events = source.aiter_sse()
        assert [json.loads((await anext(events)).data)["token"] for _ in "ab"] == ["a", "b"]
    assert await app.account.settled() == cost(5, 1)


@session
async def test_gone_before_the_body_is_complete(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays()
    browser = await send(app, make_request(app, prompt)[:-5])
    await asyncio.sleep(0.1)
    browser.close()
    assert (await app.ask(provider.plays(tokens("x", usage=(1, 1))))).status_code == 200
    assert provider.asked(prompt) == []
    assert await app.account.settled() == cost(1, 1)


# -- clients that read slowly ----------------------------------------------------------------------------------


@session
async def test_a_slow_reader_holds_back_the_provider(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(flood(600, 65_536))
    before = app.gateway.memory
    browser = await send(app, make_request(app, prompt))
    asked = await wait_for_arrival(provider, prompt)

    async def stalled() -> bool:
        seen = asked.written
        await asyncio.sleep(0.3)
        return seen > 0 and asked.written == seen

    await wait_until(stalled)
    assert asked.written < 600 * 65_536 / 3, "the kernel's buffers may fill, no more"
    assert app.gateway.memory - before < 16
    # When it reads again, everything arrives, complete and in order.
    received = await receive(browser)
    assert received.count(b"x" * 65_536) == 600
    assert b"event: done" in received[-2000:]
    assert await app.account.settled() == cost(1, 1)


TOKENS = 1_000
LENGTH = ANSWER_BYTES * 9 // 10 // TOKENS  # of a token
LONG = flood(TOKENS, LENGTH)


@module_fixture
async def narrow(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    small = {"gateway.inference.backlog.TOTAL_BYTES": 8 * ANSWER_BYTES}
    settings = {"GATEWAY_PROVIDER_CONCURRENCY": "2", "GATEWAY_PROVIDER_WAIT": "30"}
    with tempfile.TemporaryDirectory() as sockets:
        settings["GATEWAY_UPSTREAM"] = f"unix/{sockets}/gateway.sock"
        async with gateway_with_redis(provider, tmp_path_factory.mktemp("slow"), small, **settings) as gw:
            yield gw


async def settles(app: App, requests: int) -> None:
    """Waits until so many requests are settled."""

    async def paid() -> bool:
        return (await app.account.spend())["settled"] >= requests * cost(1, 1)

    await wait_until(paid, 30)


@session
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_slow_readers_hold_no_permits(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider, stream: bool
) -> None:
    hog, other = await narrow.app(backend), await narrow.app(backend)
    prompts = [provider.plays(LONG if stream else flood(TOKENS, 1_000)) for _ in range(3)]
    readers = [await send(hog, make_request(hog, prompt, stream)) for prompt in prompts]
    await settles(hog, 3)  # at its usage, which arrives at the end of an answer
    assert (await other.ask(provider.plays(tokens("a")))).status_code == 200
    for reader in readers:
        received = await receive(reader)
        if stream:
            assert received.count(b"x" * LENGTH) == TOKENS
            assert b"event: done" in received[-2000:]
        else:
            assert b"x" * (1_000 * TOKENS) in received
            assert received.endswith(b"}")


@session
async def test_a_slow_reader_that_resumes_gets_the_rest_live(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    """It does not have to wait for the end of the answer."""
    app = await narrow.app(backend)
    prompt = provider.plays(LONG[: TOKENS - 99], 1.0, *tokens("live"), 30.0)
    reader = await send(app, make_request(app, prompt))
    await asyncio.sleep(0.5)
    received = await receive(reader, b"live")
    assert b"live" in received
    assert received.count(b"x" * LENGTH) == TOKENS - 100


@session
async def test_an_account_without_room_loses_slow_readers(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    hog, other = await narrow.app(backend), await narrow.app(backend)
    one = await send(other, make_request(other, provider.plays(LONG)))
    await settles(other, 1)
    readers: list[socket.socket] = []
    for number in range(1, 8):
        app = await hog.account.app(backend)  # each app has its own rate
        readers.append(await send(app, make_request(app, provider.plays(LONG))))
        await settles(hog, number)
    await wait_until(lambda: metric(narrow, 'gateway_connections_ended_total{reason="stalled"}'))
    assert (await receive(one)).count(b"x" * LENGTH) == TOKENS
    assert (await other.ask(provider.plays(tokens("a")))).status_code == 200
    complete = [(await receive(reader)).count(b"x" * LENGTH) == TOKENS for reader in readers]
    assert 2 < complete.count(True) < 7


def test_an_account_may_hold_as_much_as_is_free() -> None:
    backlogs = Backlogs(3_000_000)
    kept: dict[str, list[Backlog]] = {"a": [], "b": [], "c": []}
    for account, mine in kept.items():
        while (backlog := Backlog(backlogs, account)).add(b"x" * 100_000):
            mine.append(backlog)
    assert [len(mine) for mine in kept.values()] == [15, 8, 4]
    for backlog in kept["a"]:
        assert backlog.next_piece() == b"x" * 100_000
    kept["b"][0].clear()
    assert backlogs.free == 3_000_000 - 11 * 100_000
    assert backlogs.reserve("d", 1_000_000)


def test_data_that_was_added_together_stays_together() -> None:
    backlog = Backlog(Backlogs(), "a")
    assert all(backlog.add(part) for part in (b"a", b"b", b"c" * PIECE_BYTES, b"d"))
    assert len(backlog) == PIECE_BYTES + 3
    assert [backlog.next_piece() for _ in range(3)] == [b"ab", b"c" * PIECE_BYTES, b"d"]
    assert not backlog
