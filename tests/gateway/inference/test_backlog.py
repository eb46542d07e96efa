"""Clients that read slowly hold a limited amount of memory, and no permit at the provider."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest

from gateway.inference.backlog import ANSWER_BYTES, PIECE_BYTES, Backlog, Backlogs
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import flood, tokens
from tests.support.accounts import App
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.metrics import metric
from tests.support.polling import wait_until
from tests.support.prices import cost

asynchronous = pytest.mark.asyncio(loop_scope="session")


def kernel_room() -> int:
    """Returns the bytes that the kernel buffers for a local client that reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.getsockname())
        sender, _ = server.accept()
        sender.setblocking(False)
        taken = 0
        with contextlib.suppress(BlockingIOError), sender:
            while True:
                taken += sender.send(b"x" * 65_536)
        return taken


TOKENS, EVENT = 1_000, 270  # bytes of an event beside its token
# A token's bytes, so that the kernel has no room for the whole answer: it takes up to half as much again in the end.
LENGTH = (kernel_room() + ANSWER_BYTES * 9 // 10) // TOKENS - EVENT
LONG = flood(TOKENS, LENGTH)

SMALL = {"gateway.inference.backlog.TOTAL_BYTES": 8 * ANSWER_BYTES}


@module_fixture
async def narrow(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    settings = {"GATEWAY_PROVIDER_CONCURRENCY": "2", "GATEWAY_PROVIDER_WAIT": "30"}
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("slow"), SMALL, **settings) as gw:
        yield gw


async def ask(app: App, prompt: str, stream: bool) -> socket.socket:
    """Sends a request in the OpenAI format, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", app.gateway.port))
    fields = {"model": "gpt-oss-120b", "messages": [{"role": "user", "content": prompt}], "stream": stream}
    body = json.dumps(fields).encode()
    head = f"POST {app.path}/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {app.token()}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    await loop.sock_sendall(client, head.encode() + body)
    return client


async def settles(app: App, requests: int) -> None:
    """Waits until so many requests are settled."""

    async def paid() -> bool:
        return (await app.account.spend())["settled"] >= requests * cost(1, 1)

    await wait_until(paid, 30)


async def rest(client: socket.socket) -> bytes:
    received = bytearray()
    loop = asyncio.get_running_loop()
    while data := await asyncio.wait_for(loop.sock_recv(client, 65_536), 10):
        received += data
    client.close()
    return bytes(received)


@asynchronous
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_slow_readers_hold_no_permits(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider, stream: bool
) -> None:
    hog, other = await narrow.app(backend), await narrow.app(backend)
    prompts = [provider.plays(LONG if stream else flood(TOKENS, 1_000)) for _ in range(3)]
    readers = [await ask(hog, prompt, stream) for prompt in prompts]
    await settles(hog, 3)  # at its usage, which arrives at the end of an answer
    assert (await other.ask(provider.plays(tokens("a")))).status_code == 200
    for reader in readers:
        received = await rest(reader)
        if stream:
            assert received.count(b"x" * LENGTH) == TOKENS
        else:
            assert b"x" * (1_000 * TOKENS) in received
        assert received.rstrip().endswith(b"data: [DONE]\n\n\r\n0" if stream else b"}")


@asynchronous
async def test_a_slow_reader_that_resumes_gets_the_rest_live(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    """It does not have to wait for the end of the answer."""
    app = await narrow.app(backend)
    first = LONG[: TOKENS - 99]
    reader = await ask(app, provider.plays(first, 1.0, *tokens("live"), 30.0), True)
    await asyncio.sleep(0.5)
    received = bytearray()
    loop = asyncio.get_running_loop()
    while b"live" not in received:
        received += await asyncio.wait_for(loop.sock_recv(reader, 65_536), 5)
    assert received.count(b"x" * LENGTH) == TOKENS - 100
    reader.close()


async def stalled(gateway: Gateway) -> float:
    return await metric(gateway, 'gateway_connections_ended_total{reason="stalled"}')


@asynchronous
async def test_an_account_without_room_loses_slow_readers(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    hog, other = await narrow.app(backend), await narrow.app(backend)
    one = await ask(other, provider.plays(LONG), True)
    await settles(other, 1)
    readers: list[socket.socket] = []
    while not await stalled(narrow):
        assert len(readers) < 12
        app = await hog.account.app(backend)  # each app has its own rate
        readers.append(await ask(app, provider.plays(LONG), True))
        await settles(hog, len(readers))
    assert len(readers) > 2
    assert (await rest(one)).count(b"x" * LENGTH) == TOKENS
    assert (await other.ask(provider.plays(tokens("a")))).status_code == 200
    for reader in readers:
        reader.close()


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
