"""The shared status while a provider is unstable, and while this process stands still."""

import asyncio
import itertools
import time

import pytest
import redis.asyncio

from gateway.keys import provider_key
from gateway.redis.scripts import CHANGES_CHANNEL
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, answer, chunk, tokens
from tests.gateway.conftest import Launch
from tests.support.accounts import App
from tests.support.inference_status import (
    OPERATIONAL,
    SOON,
    status,
    status_becomes,
)
from tests.support.polling import wait_until
from tests.support.responses import answered, ended, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

UNLIMITED = {"GATEWAY_RATE_LIMITS": "app=100000,user=100000"}
SLOWER = {"GATEWAY_PROVIDER_TIMEOUTS": "connect=1,first=1,idle=1,total=20"}


async def test_an_unstable_providers_health_is_published_at_intervals(launch: Launch, backend: FakeAppBackend) -> None:
    """If each change were announced to every process, 270 requests would cause 75 announcements."""
    async with FakeProvider() as provider, launch(GATEWAY_PROVIDER_URL=provider.url, **UNLIMITED) as gw:
        app = await gw.app(backend)
        moods = [provider.plays(tokens("x")), provider.plays(answer(402)), provider.plays(answer(500))]
        prompts = itertools.cycle(moods)
        async with redis.asyncio.Redis.from_url(gw.redis.url) as client, client.pubsub() as pubsub:
            await pubsub.subscribe(CHANGES_CHANNEL)
            began = time.monotonic()

            async def ask() -> None:
                for _ in range(9):
                    await app.ask(next(prompts))

            await asyncio.gather(*(ask() for _ in range(30)))
            passed = time.monotonic() - began
            await asyncio.sleep(0.7)
            announced = 0
            while (message := await pubsub.get_message(timeout=0.1)) is not None:
                announced += message["type"] == "message" and message["data"] == provider_key().encode()
            assert len(provider.exchanges) >= 270
            assert announced <= 2 * (passed + 0.7) + 2, f"{announced} in {passed:.1f} s"
        # In the end, every process has the true status.
        await app.ask(moods[1])
        await status_becomes(gw, ("quota-exhausted", True))
        answered(await app.ask(moods[0]))
        await status_becomes(gw, OPERATIONAL)


async def test_refusals_between_completions_change_the_status_once(launch: Launch, backend: FakeAppBackend) -> None:
    """A provider whose quota is nearly used up refuses every other request."""
    async with FakeProvider() as provider, launch(SOON, GATEWAY_PROVIDER_URL=provider.url, **UNLIMITED) as gw:
        app = await gw.app(backend)
        prompts = itertools.cycle([provider.plays(answer(402)), provider.plays(tokens("x"))])
        async with redis.asyncio.Redis.from_url(gw.redis.url) as client, client.pubsub() as pubsub:
            await pubsub.subscribe(CHANGES_CHANNEL)
            await app.ask(next(prompts))
            await status_becomes(gw, ("quota-exhausted", True))
            for _ in range(20):
                await asyncio.sleep(0.2)
                await app.ask(next(prompts))
                assert await status(gw) == ("quota-exhausted", True)
            await app.ask(provider.plays(tokens("y")))
            await status_becomes(gw, OPERATIONAL)
            announced = 0
            while (message := await pubsub.get_message(timeout=0.1)) is not None:
                announced += message["type"] == "message" and message["data"] == provider_key().encode()
            assert announced == 2


async def test_a_frozen_process_does_not_count_its_own_pause_as_silence(
    launch: Launch, backend: FakeAppBackend
) -> None:
    """The answers wait unread in their sockets while the process is stopped."""
    async with FakeProvider() as provider, launch(GATEWAY_PROVIDER_URL=provider.url, **SLOWER) as gw:
        app = await gw.app(backend)
        gate = asyncio.Event()
        flowing = provider.plays(ROLE, chunk("a"), gate, *[chunk("b"), 0.1] * 6, chunk("c", finish="stop"), DONE)
        streams = [asyncio.create_task(app.events(flowing, token=app.token(f"u{n}"))) for n in range(3)]
        await wait_until(lambda: len(provider.asked(flowing)) == 3)
        with gw.paused():
            gate.set()
            await asyncio.sleep(1.6)
        for events in await asyncio.gather(*streams):
            ended(events)
            assert text_of(events) == "a" + "b" * 6 + "c"
        assert await status(gw) == OPERATIONAL


async def test_many_refusals_cause_one_probe_at_a_time(launch: Launch, backend: FakeAppBackend) -> None:
    async with FakeProvider() as provider, launch(GATEWAY_PROVIDER_URL=provider.url, **UNLIMITED) as gw:
        app: App = await gw.app(backend)
        gate = asyncio.Event()
        refusal = provider.plays(answer(401))
        await app.ask("x")
        provider.models_script = [gate, *answer(200, {"data": []})]
        await asyncio.gather(*(app.ask(refusal) for _ in range(30)))
        await asyncio.sleep(0.3)
        assert len(provider.probes) == 1
        gate.set()
        await asyncio.sleep(0.2)
        await app.ask(refusal)
        await wait_until(lambda: len(provider.probes) == 2)
        assert await status(gw) == OPERATIONAL
