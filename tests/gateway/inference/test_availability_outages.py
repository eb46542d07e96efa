"""The status of a provider while this process stands still."""

import asyncio

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk
from tests.gateway.conftest import Launch
from tests.support.inference_status import OPERATIONAL, status
from tests.support.polling import wait_until
from tests.support.responses import ended, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

SLOWER = {"GATEWAY_PROVIDER_TIMEOUTS": "connect=1,first=1,idle=1,total=20"}


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
