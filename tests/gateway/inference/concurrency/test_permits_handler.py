"""The queue for the provider as callers experience it: order, refusals, and waits that end early."""

import asyncio
import collections
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk, tokens
from tests.fakes.server import HANG, Head
from tests.support.accounts import App
from tests.support.fixtures import session_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.metrics import metric
from tests.support.polling import wait_until
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


@session_fixture
async def narrow(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Two requests at the provider at once, and a maximum wait of two seconds."""
    settings = {"GATEWAY_PROVIDER_CONCURRENCY": "2", "GATEWAY_PROVIDER_WAIT": "2", "GATEWAY_DRAIN": "2"}
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("narrow"), **settings) as gw:
        yield gw


@contextlib.asynccontextmanager
async def busy(gateway: Gateway, app: App, provider: FakeProvider) -> AsyncIterator[None]:
    """Holds both permits until the block ends."""
    prompt = provider.plays(ROLE, HANG)
    asks = [asyncio.create_task(app.ask(prompt, stream=True)) for _ in range(2)]
    await wait_until(lambda: len(provider.asked(prompt)) == 2)
    try:
        yield
    finally:
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)


async def waiting(
    gateway: Gateway, app: App, prompt: str, count: int = 1, *, stream: bool = False
) -> asyncio.Task[httpx.Response]:
    """Sends a request, and returns once it waits as the last of `count`."""
    ask = asyncio.create_task(app.ask(prompt, stream=stream))

    async def waits() -> bool:
        return await metric(gateway, "gateway_provider_waiting") == count

    await wait_until(waits)
    return ask


async def test_the_provider_never_gets_more_requests_than_the_limit(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    apps = [await narrow.app(backend) for _ in range(3)]
    prompt = provider.plays(ROLE, chunk("a"), 0.2, *tokens("b")[1:])
    answers = await asyncio.gather(*(app.ask(prompt) for app in apps for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 12
    began = sorted(exchange.at for exchange in provider.asked(prompt))
    assert all(later - earlier > 0.18 for earlier, later in zip(began, began[2:], strict=False))
    assert await metric(narrow, "gateway_provider_permits") == 2
    assert await metric(narrow, "gateway_provider_wait_seconds_count") >= 8


async def test_a_request_that_waits_too_long_is_refused_and_costs_nothing(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    app, other = await narrow.app(backend), await narrow.app(backend)
    async with busy(narrow, app, provider):
        began = time.monotonic()
        answer = await other.ask(provider.plays(tokens("never")))
        assert 1.8 < time.monotonic() - began < 5
        refused(answer, 503, "PROVIDER_QUOTA_EXHAUSTED")
        assert int(answer.headers["retry-after"]) >= 1
        assert await other.account.spend() | {"settled": 0, "reserved": 0} == await other.account.spend()


async def test_a_freed_permit_goes_to_a_waiting_request(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    app, other = await narrow.app(backend), await narrow.app(backend)
    async with busy(narrow, app, provider):
        ask = await waiting(narrow, other, provider.plays(tokens("Guten", " Tag")))
    assert (await ask).json()["text"] == "Guten Tag"


async def test_a_client_that_leaves_leaves_the_queue(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    app, other = await narrow.app(backend), await narrow.app(backend)
    prompt = provider.plays(tokens("never"))
    async with busy(narrow, app, provider):
        ask = await waiting(narrow, other, prompt)
        left = time.monotonic()
        ask.cancel()

        async def gone() -> bool:
            return await metric(narrow, "gateway_provider_waiting") == 0

        await wait_until(gone)
        assert time.monotonic() - left < 1.5, "before its maximum wait of two seconds ends"
    assert await other.account.settled() == 0
    assert not provider.asked(prompt)


async def test_the_emergency_off_file_ends_waits(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    app, other = await narrow.app(backend), await narrow.app(backend)
    file = Path(narrow.environment["GATEWAY_EMERGENCY_OFF_FILE"])
    async with busy(narrow, app, provider):
        ask = await waiting(narrow, other, provider.plays(tokens("never")))
        file.touch()
        try:
            refused(await asyncio.wait_for(ask, 1.5), 503, "INFERENCE_DISABLED")
        finally:
            file.unlink()
    assert await other.account.settled() == 0


async def test_the_requests_of_a_deleted_app_stop_waiting(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    app, other = await narrow.app(backend), await narrow.app(backend)
    async with busy(narrow, app, provider):
        ask = await waiting(narrow, other, provider.plays(tokens("never")))
        await narrow.platform("DELETE", f"/apps/{other.name}")
        refused(await asyncio.wait_for(ask, 1.5), 404, "APP_NOT_FOUND")


async def test_a_429_without_a_quota_halves_the_limit(
    backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    async with gateway_with_redis(provider, tmp_path, GATEWAY_PROVIDER_CONCURRENCY="4") as gw:
        app = await gw.app(backend)
        refused(await app.ask(provider.plays(Head(429), b"slow down")), 503, "PROVIDER_QUOTA_EXHAUSTED")

        async def permits() -> float:
            return await metric(gw, "gateway_provider_permits")

        async def halved() -> bool:
            return 2 <= await permits() < 4

        async def whole() -> bool:
            return await permits() == 4

        await wait_until(halved, timeout=3)
        await wait_until(whole, timeout=10)
        refused(await app.ask(provider.plays(Head(429), b'{"error":"quota"}')), 503, "PROVIDER_QUOTA_EXHAUSTED")
        await asyncio.sleep(0.5)
        assert await permits() == 4


async def test_without_waiting_and_without_a_limit(
    backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    settings = {"GATEWAY_PROVIDER_CONCURRENCY": "1", "GATEWAY_PROVIDER_WAIT": "0"}
    async with gateway_with_redis(provider, tmp_path, **settings) as gw:
        app = await gw.app(backend)
        prompt = provider.plays(ROLE, HANG)
        holding = asyncio.create_task(app.ask(prompt))
        await wait_until(lambda: provider.asked(prompt))
        began = time.monotonic()
        refused(await app.ask(provider.plays(tokens("never"))), 503, "PROVIDER_QUOTA_EXHAUSTED")
        assert time.monotonic() - began < 1.5
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
    async with gateway_with_redis(provider, tmp_path, GATEWAY_PROVIDER_CONCURRENCY="0") as gw:
        app = await gw.app(backend)
        assert (await app.ask(provider.plays(tokens("yes")))).json()["text"] == "yes"


async def test_waiting_requests_end_with_the_drain(
    backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    settings = {"GATEWAY_PROVIDER_CONCURRENCY": "1", "GATEWAY_DRAIN": "1"}
    async with gateway_with_redis(provider, tmp_path, **settings) as gw:
        app = await gw.app(backend)
        prompt = provider.plays(ROLE, chunk("a"), 0.6, *tokens("b")[1:])
        first = asyncio.create_task(app.ask(prompt))
        await wait_until(lambda: provider.asked(prompt))
        second = await waiting(gw, app, provider.plays(tokens("in time")))
        hanging = provider.plays(ROLE, HANG)
        third = await waiting(gw, app, hanging, 2)
        fourth = await waiting(gw, app, provider.plays(tokens("never")), 3)
        stopping = asyncio.create_task(gw.stop())
        assert (await first).status_code == 200
        assert (await second).json()["text"] == "in time", "it was served while the process drained"
        refused(await third, 503, "BACKBONE_UNAVAILABLE")
        refused(await fourth, 503, "BACKBONE_UNAVAILABLE")
        await stopping


async def test_a_stream_that_waits_is_kept_alive(
    backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    """A proxy or a browser would give up on a connection without a byte."""
    settings = {"GATEWAY_PROVIDER_CONCURRENCY": "1", "GATEWAY_PROVIDER_WAIT": "3", "GATEWAY_KEEP_ALIVE": "0.5"}
    async with gateway_with_redis(provider, tmp_path, **settings) as gw:
        app = await gw.app(backend)
        prompt = provider.plays(ROLE, 2.0, *tokens("first")[1:])
        first = asyncio.create_task(app.ask(prompt))
        await wait_until(lambda: provider.asked(prompt))
        hanging = provider.plays(ROLE, chunk("second"), 4.0, *tokens("")[2:])
        patient = await waiting(gw, app, hanging, stream=True)
        native = asyncio.create_task(app.ask(provider.plays(tokens("never")), stream=True))
        openai = asyncio.create_task(
            app.post({"messages": [{"role": "user", "content": "never"}], "stream": True}, path="/chat/completions")
        )
        whole = asyncio.create_task(app.ask(provider.plays(tokens("never"))))
        assert (await first).json()["text"] == "first"
        refused(await whole, 503, "PROVIDER_QUOTA_EXHAUSTED")
        answer = await native
        assert answer.status_code == 200
        assert answer.text.startswith(": keep-alive\n\n: keep-alive\n\n")
        assert "event: error" in answer.text
        assert "PROVIDER_QUOTA_EXHAUSTED" in answer.text
        answer = await openai
        assert answer.status_code == 200
        assert answer.text.count('"delta":{') >= 2
        assert '"code":"PROVIDER_QUOTA_EXHAUSTED"' in answer.text
        answer = await patient
        assert answer.text.startswith(': keep-alive\n\n: keep-alive\n\n: keep-alive\n\ndata: {"token":"second"}')
        assert "event: done" in answer.text


async def test_a_burst_of_one_account_within_the_free_permits(
    backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    settings = {"GATEWAY_PROVIDER_CONCURRENCY": "1000", "GATEWAY_RATE_LIMITS": "app=1000,user=1000"}
    async with gateway_with_redis(provider, tmp_path, **settings) as gw:
        app = await gw.app(backend)
        await app.ask(provider.plays(tokens("a")))  # caches the token
        body = json.dumps({"prompt": provider.plays(ROLE, 1.0, *tokens("a")[1:])})
        request = f"POST {app.path} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        request += f"Authorization: Bearer {app.token()}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        clients = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", gw.port) for _ in range(500)))
        for _, writer in clients:
            writer.write(request.encode())
        lines = await asyncio.gather(*(asyncio.wait_for(reader.readline(), 20) for reader, _ in clients))
        assert collections.Counter(lines) == {b"HTTP/1.1 200 OK\r\n": 500}
        for _, writer in clients:
            writer.close()


async def test_callers_wait_for_the_quota_or_get_a_retry_after(
    backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    constants = {"gateway.inference.concurrency.quota.WINDOW_SECONDS": 4.0}
    settings = {"GATEWAY_PROVIDER_RATE": "requests=4", "GATEWAY_PROVIDER_WAIT": "1"}
    async with gateway_with_redis(provider, tmp_path, constants, **settings) as gw:
        app, other = await gw.app(backend), await gw.app(backend)
        began = time.monotonic()
        prompts = [provider.plays(tokens("yes")) for _ in range(6)]
        answers = [await app.ask(prompt) for prompt in prompts[:4]]
        assert [answer.status_code for answer in answers] == [200] * 4
        late = await other.ask(prompts[4])
        refused(late, 503, "PROVIDER_QUOTA_EXHAUSTED")
        assert await other.account.settled() == 0
        assert 1 <= int(late.headers["retry-after"]) <= 4
        await asyncio.sleep(int(late.headers["retry-after"]))
        answered(await other.ask(prompts[5]))
        assert time.monotonic() - began > 3.9
        asked = sorted(exchange.at for prompt in prompts for exchange in provider.asked(prompt))
        assert len(asked) == 5
        assert asked[4] - asked[0] > 3.9


async def test_reserved_tokens_are_corrected_by_the_usage(
    backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    """Each request reserves about 2,300 tokens and uses ten. Without the correction, only four would pass."""
    settings = {"GATEWAY_PROVIDER_RATE": "tokens=10000", "GATEWAY_PROVIDER_WAIT": "1"}
    async with gateway_with_redis(provider, tmp_path, **settings) as gw:
        app = await gw.app(backend)
        for _ in range(12):
            answered(await app.ask(provider.plays(tokens("yes", usage=(7, 3)))))
        long = "x" * 12_000
        provider.plays(tokens("never"), prompt=long)
        refused(await app.ask(long), 400, "PROVIDER_REFUSED")
        assert not provider.asked(long)
        answered(await app.ask(provider.plays(tokens("yes"))))
