"""Streams whose readers stop do not fill the gateway's memory or delay the bystander."""

import json

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import flood, joined
from tests.hostile.bystander import FULL, Bystander, assert_unharmed, measure_app, report_row, run_attack
from tests.support.polling import wait_until
from tests.support.raw_http import request

pytestmark = pytest.mark.asyncio(loop_scope="session")

# The kernel buffers some megabytes for a client that does not read, and less if there are thousands of them.
STREAMS = 5000 if FULL else 200
TOKEN_BYTES = 1000 if FULL else 8000
TOKENS = 2000 if FULL else 1600  # of each answer
HELD_MIB = 0.6 if FULL else 1.5  # of the gateway's memory for each stream, at most


async def test_streams_whose_readers_stop(
    bystander: Bystander, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    before = bystander.before
    hostile = await bystander.gateway.app(backend)
    # The writes are large, because the provider shares the test's loop and must also answer the bystander.
    prompt = provider.plays([joined(flood(50, TOKEN_BYTES)[:-3])] * (TOKENS // 50), flood(0, 0))
    body = json.dumps({"prompt": prompt, "stream": True, "maxTokens": TOKENS}).encode()
    data = request(hostile.path, body, f"Authorization: Bearer {hostile.token()}")
    async with run_attack(bystander.gateway, "stall", STREAMS, data, patience=120):
        during = await measure_app(bystander.app)
        report_row(f"{STREAMS:,} streams whose readers stop", before, during)
        assert_unharmed(before, during)
        # The gateway reads the answers to the end, and disconnects clients above the account's share of memory. One or
        # two reads of the provider's socket, of 256 KiB each, may wait as well.
        assert during.memory - before.memory < 50 + STREAMS * HELD_MIB
        await wait_until(lambda: bystander.gateway.descriptors < before.descriptors + 100, 60)
