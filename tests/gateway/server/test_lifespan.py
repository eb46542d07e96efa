"""On SIGTERM, streams may finish for a while, and the rest cost their full reservation."""

import asyncio
import contextlib
import signal
import time

import httpx
import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk
from tests.fakes.server import HANG
from tests.gateway.conftest import Launch
from tests.support.accounts import App
from tests.support.gateway_process import gateway
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import cost, max_cost
from tests.support.responses import ended, refused, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def open_stream(app: App, prompt: str) -> "asyncio.Task[list]":
    started = asyncio.Event()

    async def listen() -> list:
        heard = []
        async with app.stream(prompt) as source:
            try:
                async for event in source.aiter_sse():
                    heard.append(event)
                    started.set()
            except httpx.TransportError:
                heard.append(None)
        return heard

    task = asyncio.create_task(listen())
    await asyncio.wait_for(started.wait(), 5)
    return task


async def test_drain(launch: Launch, backend: FakeAppBackend, provider: FakeProvider) -> None:
    async with launch(GATEWAY_DRAIN="4") as gw, gateway(gw.redis.url, provider, gw.folder) as heir:
        finishing, hanging, late = [await gw.app(backend) for _ in range(3)]
        gate = asyncio.Event()
        first = provider.plays(ROLE, chunk("Gu"), gate, chunk("ten"), chunk(finish="stop"), chunk(usage=(3, 2)), DONE)
        second = provider.plays(ROLE, chunk("Gu"), HANG)
        streams = [await open_stream(finishing, first), await open_stream(hanging, second)]
        signalled = time.monotonic()
        gw.signal(signal.SIGTERM)

        async def closed() -> bool:
            if await gw.answers("/ready"):
                return False
            with contextlib.suppress(httpx.TransportError):
                return (await late.ask("x")).status_code == 503
            return True

        await wait_until(closed, 3)
        assert gw.code is None, "streams are still running"
        gate.set()
        heard = await streams[0]
        assert text_of(heard) == "Guten"
        assert ended(heard)["usage"] == {"inputTokens": 3, "outputTokens": 2}
        cut = await streams[1]
        assert 3.5 < time.monotonic() - signalled < 10
        # The stream is interrupted, with or without an error, and never finishes.
        assert cut[-1] is None or cut[-1].event in ("message", "error")
        assert await wait_until(lambda: gw.code, 5, holds=lambda code: code is not None) in (0, -signal.SIGTERM)
        await asyncio.wait_for(provider.asked(second)[0].canceled.wait(), PATIENCE_SECONDS)
        for app, expected in ((finishing, cost(3, 2)), (hanging, max_cost(second))):
            app.account.gateway = heir
            assert await app.account.settled() == expected


async def test_a_request_that_passes_admission_after_the_drain_is_refused(
    launch: Launch, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    """Its token check takes longer than the drain."""
    async with FakeAppBackend() as slow, launch(GATEWAY_DRAIN="1") as gw:
        app, other = await gw.app(slow), await gw.app(backend)
        stream = await open_stream(other, provider.plays(ROLE, chunk("a"), HANG))
        slow.gate.clear()
        prompt = provider.plays(ROLE, chunk("a"), HANG)
        late = asyncio.create_task(app.ask(prompt, stream=True))
        await wait_until(lambda: slow.fetches)
        gw.signal(signal.SIGTERM)
        await stream  # the end of the drain interrupts it
        slow.gate.set()
        refused(await late, 503, "BACKBONE_UNAVAILABLE")
        assert provider.asked(prompt) == [], "nothing was sent, so nothing is charged"
        await wait_until(lambda: gw.code is not None, 5)
        with gw.redis.client() as client:
            assert list(client.scan_iter("*:reservations")) == []
