"""Attacks on a gateway do not delay the bystander: connections, streams and tokens.

`pytest -s` prints the figures.
"""

import asyncio
import contextlib
import json
import re
import time

import pytest

from gateway.inference.auth.backend import CALL_SECONDS
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import flood, joined
from tests.fakes.server import HANG
from tests.hostile.attacker import TOKEN
from tests.hostile.bystander import (
    FULL,
    SECONDS,
    Bystander,
    assert_unharmed,
    measure_app,
    report_row,
    run_attack,
    scale_attack,
)
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.raw_http import request

pytestmark = pytest.mark.asyncio(loop_scope="session")

# -- connections that never complete a request ---------------------------------------------------------------

# By title: what opens each connection, and then drips.
HELD = {
    "heads that drip": (b"POST /capsule/x/ai HTTP/1.1\r\nhost: x\r\nx: ", b"x"),
    "silence": (b"", b"x"),
    "bodies that drip": (request("/register", b"", "Content-Length: 60000") + b"{", b"x"),
    "line breaks after an answer": (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"\n"),
}


@pytest.mark.parametrize("attack", HELD)
async def test_connections_that_are_held(bystander: Bystander, attack: str) -> None:
    """The gateway closes the attacker's connections."""
    count, (opening, drip), before = scale_attack(5000), HELD[attack], bystander.before
    async with run_attack(bystander.gateway.port, "hold", count, opening, drip=drip):
        during = await measure_app(bystander.app)
    report_row(f"{count:,} connections: {attack}", before, during)
    assert_unharmed(before, during)
    assert during.descriptors <= before.descriptors + count + 20
    assert during.memory - before.memory < 30 + count * 0.03
    await wait_until(lambda: bystander.gateway.descriptors < before.descriptors + 20, 20)


# -- streams whose readers stop ------------------------------------------------------------------------------

# The kernel buffers some megabytes for a client that does not read, and less if there are thousands of them.
STREAMS = 5000 if FULL else 200
TOKEN_BYTES = 1000 if FULL else 8000
TOKENS = 2000 if FULL else 1600  # of each answer
HELD_MIB = 0.6 if FULL else 1.5  # of the gateway's memory for each stream, at most


async def test_streams_whose_readers_stop(
    bystander: Bystander, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    """They do not fill the gateway's memory, either."""
    before = bystander.before
    hostile = await bystander.gateway.app(backend)
    # The writes are large, because the provider shares the test's loop and must also answer the bystander.
    prompt = provider.plays([joined(flood(50, TOKEN_BYTES)[:-3])] * (TOKENS // 50), flood(0, 0))
    body = json.dumps({"prompt": prompt, "stream": True, "maxTokens": TOKENS}).encode()
    data = request(hostile.path, body, f"Authorization: Bearer {hostile.token()}")
    async with run_attack(bystander.gateway.port, "stall", STREAMS, data, patience=120):
        during = await measure_app(bystander.app)
        report_row(f"{STREAMS:,} streams whose readers stop", before, during)
        assert_unharmed(before, during)
        # The gateway reads the answers to the end, and disconnects clients above the account's share of memory. One or
        # two reads of the provider's socket, of 256 KiB each, may wait as well.
        assert during.memory - before.memory < 50 + STREAMS * HELD_MIB
        await wait_until(lambda: bystander.gateway.descriptors < before.descriptors + 100, 60)


# -- invalid tokens ------------------------------------------------------------------------------------------


def make_flood(app: App, *headers: str) -> bytes:
    return request(app.path, b'{"prompt":"x"}', *headers)


BEARER = f"Authorization: Bearer {TOKEN.decode()}"


async def count_refusals(gateway: Gateway) -> float:
    """Returns how many requests got 401, 429 for too many bad tokens, or 503 for a key set, since the start."""
    metrics = (await gateway.http.get("/metrics")).text
    found = re.findall(r'^gateway_requests_total\{.*code="(?:TOKENS?|APP_BACKEND)_.*\} (\S+)$', metrics, re.M)
    return sum(map(float, found))


@pytest.mark.parametrize("kind", ["no token", "an unknown kid", "a bad signature", "no kid"])
async def test_garbage_tokens(bystander: Bystander, backend: FakeAppBackend, kind: str) -> None:
    gateway, hostile = bystander.gateway, await bystander.gateway.app(backend)
    kids = {"an unknown kid": {"kid": "nobody"}, "a bad signature": {"kid": backend.keys["ES256"][0]}}
    header = {"alg": "ES256", **kids.get(kind, {})}
    data = make_flood(hostile, *([] if kind == "no token" else [BEARER]))
    async with run_attack(gateway.port, "flood", 20, data, rate=1000, header=header):
        refused = await count_refusals(gateway)
        during = await measure_app(bystander.app)
        rate = (await count_refusals(gateway) - refused) / SECONDS
    assert rate > 300, "the attack was too slow to count"
    report_row(f"1,000 requests per second with {kind}", bystander.before, during)
    assert_unharmed(bystander.before, during)


# -- backends that hang --------------------------------------------------------------------------------------

ORIGINS = 16
RATE = 100  # garbage tokens per second for all of them
COLD = 12  # apps of other accounts, whose keys the gateway has not fetched
ALLOWED_SECONDS = 2.0  # for an answer; the goal is 0.1 on a quiet machine


async def test_cold_apps_beside_an_account_whose_origins_hang(bystander: Bystander, backend: FakeAppBackend) -> None:
    """Calls to the hanging origins leave calls free for the origins of other accounts."""
    gateway, account = bystander.gateway, await bystander.gateway.account()
    victims, hanging, times = [await gateway.app(backend) for _ in range(COLD)], [], []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(ORIGINS):  # each at an address of its own
            origin = await stack.enter_async_context(FakeAppBackend())
            origin.refresh = [HANG]
            auth = {"kind": "backend", "url": origin.refresh_url, "method": "POST", "userField": "record.id"}
            hanging.append(await account.app(origin, auth=auth))
        requests = [make_flood(app, BEARER) for app in hanging]
        async with run_attack(gateway.port, "flood", 40 * ORIGINS, *requests, rate=RATE) as answers:
            await asyncio.sleep(2)
            for victim in victims:
                began = time.perf_counter()
                assert (await victim.ask("x")).status_code == 200
                times.append(time.perf_counter() - began)
                await asyncio.sleep(0.2)
            await asyncio.sleep(CALL_SECONDS)  # until the first calls to the hanging origins have ended
        calls = max(len(app.backend.exchanges) for app in hanging)
    print(f"\ncold apps: worst {max(times) * 1000:.0f} ms; at most {calls} calls for one hanging origin; {answers}")
    assert max(times) < ALLOWED_SECONDS
    assert answers
    assert answers.keys() <= {"503", "429"}
