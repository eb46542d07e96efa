"""The end of a process, in which streams may finish for a while, and what it says at its start."""

import asyncio
import contextlib
import json
import signal
import time
from pathlib import Path

import httpx
import pytest

from gateway.accounts.vault import Vault
from gateway.events.webhooks import Webhooks
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk
from tests.fakes.server import HANG
from tests.gateway.conftest import Launch
from tests.support.accounts import App
from tests.support.gateway_process import gateway
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import cost, max_cost
from tests.support.redis_servers import RedisServer
from tests.support.responses import ended, refused, text_of
from tests.support.stores import opened
from tests.support.worker_process import Worker

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


REASON = "GATEWAY_ENCRYPTION_KEY opens 0 of 1 stored secrets"


def lines(log: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in log.splitlines() if '"secrets.unopened"' in line]


async def test_a_key_that_opens_nothing(provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path) -> None:
    with RedisServer() as server:
        async with opened(server.url) as store:
            vault = Vault("another-encryption-key-of-32-characters")
            await Webhooks(store, vault, allow_private=True).set_receiver("acc_1", "http://127.0.0.1:9/")
        async with gateway(server.url, provider, tmp_path) as wrong, Worker(server.url, tmp_path, "webhooks") as worker:

            async def warning() -> str:
                answer = await wrong.http.get("/ready")
                assert answer.status_code == 200
                return str(answer.json().get("warning", ""))

            await wait_until(warning, holds=lambda text: text == f"{REASON}.")
            await warning()
            (line,) = lines(wrong.log)
            assert (line["level"], line["reason"]) == ("error", REASON)
            assert "capsule secrets check" in line["action"]
            assert (await (await wrong.app(backend)).ask("x")).status_code == 200
            await wait_until(lambda: lines(worker.log))
