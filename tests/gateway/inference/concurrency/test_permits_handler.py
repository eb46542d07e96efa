"""The queue for the provider as callers experience it: order, refusals, and waits that end early."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk, tokens
from tests.fakes.server import HANG
from tests.support.accounts import App
from tests.support.background import cancel
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.metrics import metric
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


@module_fixture
async def narrow(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Two requests at the provider at once, and a maximum wait of three seconds."""
    settings = {"GATEWAY_PROVIDER_CONCURRENCY": "2", "GATEWAY_PROVIDER_WAIT": "3", "GATEWAY_KEEP_ALIVE": "0.3"}
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
        await cancel(*asks)


async def waiting(
    gateway: Gateway, app: App, prompt: str, count: int = 1, *, stream: bool = False
) -> asyncio.Task[httpx.Response]:
    """Sends a request, and returns once it waits as the last of `count`."""
    ask = asyncio.create_task(app.ask(prompt, stream=stream))

    async def waits() -> bool:
        return await metric(gateway, 'gateway_provider_waiting{provider="default"}') == count

    await wait_until(waits)
    return ask


def chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "stream": True}


async def test_streams_that_wait_are_kept_alive(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    """A proxy or a browser would give up on a connection without a byte."""
    app = await narrow.app(backend)
    async with busy(narrow, app, provider):
        native, openai, whole = await asyncio.gather(
            app.ask("never", stream=True), app.post(chat("never"), path="/chat/completions"), app.ask("never")
        )
        served = asyncio.create_task(app.post(chat(provider.plays(tokens("Hi"))), path="/chat/completions"))
        await wait_until(lambda: metric(narrow, 'gateway_provider_waiting{provider="default"}'))
        await asyncio.sleep(0.8)
    refused(whole, 503, "PROVIDER_QUOTA_EXHAUSTED")
    assert (native.status_code, openai.status_code) == (200, 200)
    assert native.text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert "event: error" in native.text
    assert "PROVIDER_QUOTA_EXHAUSTED" in native.text
    assert openai.text.count('"delta":{') >= 2
    assert '"code":"PROVIDER_QUOTA_EXHAUSTED"' in openai.text
    deltas = [json.loads(line[6:]) for line in (await served).text.splitlines() if line.startswith("data: {")]
    first, *others = [each["choices"][0]["delta"] for each in deltas]
    assert first == {"role": "assistant", "content": ""}, "clients refuse an answer without it"
    assert {"content": "Hi"} in others


async def test_the_provider_never_gets_more_requests_than_the_limit(
    narrow: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    apps = [await narrow.app(backend) for _ in range(2)]
    waits = 'gateway_provider_wait_seconds_count{provider="default"}'
    before = await metric(narrow, waits)
    prompt = provider.plays(ROLE, chunk("a"), 0.2, *tokens("b")[1:])
    answers = await asyncio.gather(*(app.ask(prompt) for app in apps for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 8
    began = sorted(exchange.at for exchange in provider.asked(prompt))
    assert all(later - earlier > 0.18 for earlier, later in zip(began, began[2:], strict=False))
    assert await metric(narrow, 'gateway_provider_permits{provider="default"}') == 2
    assert await metric(narrow, waits) >= before + 4


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
            return await metric(narrow, 'gateway_provider_waiting{provider="default"}') == 0

        await wait_until(gone)
        assert time.monotonic() - left < 1.5, "before its maximum wait ends"
    assert await other.account.settled() == 0
    assert not provider.asked(prompt)


async def suspend(app: App) -> None:
    await app.gateway.platform("PUT", f"apps/{app.name}/suspension", {"reason": "test"})


async def delete(app: App) -> None:
    await app.gateway.platform("DELETE", f"apps/{app.name}")


async def switch_off(app: App) -> None:
    app.gateway.off_file.touch()


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [(switch_off, 503, "INFERENCE_DISABLED"), (delete, 404, "APP_NOT_FOUND"), (suspend, 403, "APP_SUSPENDED")],
)
async def test_a_change_ends_waits(
    narrow: Gateway,
    backend: FakeAppBackend,
    provider: FakeProvider,
    change: Callable[[App], Awaitable[None]],
    status: int,
    code: str,
) -> None:
    app, other = await narrow.app(backend), await narrow.app(backend)
    async with busy(narrow, app, provider):
        ask = await waiting(narrow, other, provider.plays(tokens("never")))
        try:
            await change(other)
            refused(await asyncio.wait_for(ask, PATIENCE_SECONDS), status, code)
        finally:
            narrow.off_file.unlink(missing_ok=True)
    if change is switch_off:
        assert await other.account.settled() == 0


async def test_waiting_requests_end_with_the_drain(
    backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    settings = {"GATEWAY_PROVIDER_CONCURRENCY": "1", "GATEWAY_DRAIN": "2"}
    async with gateway_with_redis(provider, tmp_path, **settings) as gw:
        app, gate = await gw.app(backend), asyncio.Event()
        prompt = provider.plays(ROLE, chunk("a"), gate, *tokens("b")[1:])
        first = asyncio.create_task(app.ask(prompt))
        await wait_until(lambda: provider.asked(prompt))
        second = await waiting(gw, app, provider.plays(tokens("in time")))
        hanging = provider.plays(ROLE, HANG)
        third = await waiting(gw, app, hanging, 2)
        fourth = await waiting(gw, app, provider.plays(tokens("never")), 3)
        stopping = asyncio.create_task(gw.stop())
        await asyncio.sleep(0.1)  # SIGTERM is sent
        gate.set()
        assert (await first).status_code == 200
        assert (await second).json()["text"] == "in time", "it was served while the process drained"
        refused(await third, 503, "BACKBONE_UNAVAILABLE")
        refused(await fourth, 503, "BACKBONE_UNAVAILABLE")
        await stopping


async def test_callers_wait_for_the_quota_or_get_a_retry_after(
    backend: FakeAppBackend, provider: FakeProvider, tmp_path: Path
) -> None:
    """Each request reserves about 2,300 tokens and uses ten. Without the correction, only four would pass."""
    settings = {"GATEWAY_PROVIDER_RATE": "requests=13,tokens=10000", "GATEWAY_PROVIDER_WAIT": "1"}
    async with gateway_with_redis(provider, tmp_path, **settings) as gw:
        app = await gw.app(backend)
        for _ in range(12):
            answered(await app.ask(provider.plays(tokens("yes", usage=(7, 3)))))
        long = "x" * 12_000
        provider.plays(tokens("never"), prompt=long)
        refused(await app.ask(long), 400, "PROVIDER_REFUSED")
        assert not provider.asked(long)
        answered(await app.ask(provider.plays(tokens("yes", usage=(7, 3)))))
        late, other = provider.plays(tokens("never")), await gw.app(backend)
        response = await other.ask(late)
        refused(response, 503, "PROVIDER_QUOTA_EXHAUSTED")
        assert 30 <= int(response.headers["retry-after"]) <= 60
        assert not provider.asked(late)
        assert await other.account.settled() == 0
