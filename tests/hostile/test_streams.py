"""Streams whose readers stop: the gateway must not keep what they do not read."""

import json

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import flood, joined
from tests.hostile.bystander import (
    FULL,
    Bystander,
    assert_unharmed,
    attacked,
    descriptors,
    measure,
    process_of,
    report,
)
from tests.support.polling import wait_until
from tests.support.raw_http import request

pytestmark = pytest.mark.asyncio(loop_scope="session")

# The kernel takes some megabytes for a client that does not read, and less if there are thousands of them.
COUNT, TOKEN, ANSWER, HELD = (5000, 1000, 2000, 0.6) if FULL else (200, 8000, 1600, 1.5)  # streams, bytes, tokens, MiB


@pytest.mark.timeout(300)
async def test_streams_whose_readers_stop(honest: Bystander, backend: FakeAppBackend, provider: FakeProvider) -> None:
    before = honest.before
    hostile = await honest.gateway.app(backend)
    # In large writes: the provider shares the test's loop, and has the bystander to answer meanwhile.
    prompt = provider.plays([joined(flood(50, TOKEN)[:-3])] * (ANSWER // 50), flood(0, 0))
    body = json.dumps({"prompt": prompt, "stream": True, "maxTokens": ANSWER}).encode()
    asked = request(hostile.path, body, f"Authorization: Bearer {hostile.token()}")
    async with attacked(honest.gateway, "stall", COUNT, asked, patience=120):
        during = await measure(honest.app)
        report(f"{COUNT:,} streams whose readers stop", before, during)
        assert_unharmed(before, during)
        # Their answers are read to the end, and those for which the account has no room are disconnected.
        assert FULL or during.descriptors < before.descriptors + 0.5 * COUNT
        # What one read of the provider's socket gave may wait as well: 256 KiB, or twice that.
        assert during.memory - before.memory < 50 + COUNT * HELD
        await wait_until(lambda: descriptors(process_of(honest.gateway)) < before.descriptors + 100, 60)
