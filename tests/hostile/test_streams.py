"""Streams whose readers stop: the gateway must not keep what they do not read."""

import json

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import flood, joined
from tests.hostile.bystander import (
    Bystander,
    assert_unharmed,
    attacked,
    descriptors,
    measure,
    process_of,
    report,
    scaled,
)
from tests.support.polling import wait_until
from tests.support.raw_http import request

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.timeout(300)
async def test_streams_whose_readers_stop(honest: Bystander, backend: FakeAppBackend, provider: FakeProvider) -> None:
    before, count = honest.before, scaled(2000)
    hostile = await honest.gateway.app(backend)
    # In large writes: the provider shares the test's loop, and has the bystander to answer meanwhile.
    prompt = provider.plays([joined(flood(50, 1000)[:-3])] * 40, flood(0, 0))
    body = json.dumps({"prompt": prompt, "stream": True, "maxTokens": 2000}).encode()
    asked = request(hostile.path, body, f"Authorization: Bearer {hostile.token()}")
    async with attacked(honest.gateway, "stall", count, asked, patience=120):
        during = await measure(honest.app)
        report(f"{count:,} streams whose readers stop", before, during)
        assert_unharmed(before, during)
        # What one read of the provider's socket gave may wait on either side of the relay: 256 KiB, or twice that.
        assert during.memory - before.memory < 50 + count * 0.6
        # Each one costs two descriptors until it is ended for not reading.
        await wait_until(lambda: descriptors(process_of(honest.gateway)) < before.descriptors + 100, 60)
