"""A thousand requests per second with invalid tokens do not delay the bystander."""

import re

import pytest

from tests.fakes import FakeAppBackend
from tests.hostile.bystander import SECONDS, Bystander, assert_unharmed, measure_app, report_row, run_attack
from tests.hostile.flood import SIGNATURES, make_garbage_token
from tests.support.gateway_process import Gateway
from tests.support.raw_http import request

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def count_refusals(gateway: Gateway) -> float:
    """Returns how many requests got 401, 429 for too many bad tokens, or 503 for a key set, since the start."""
    metrics = (await gateway.http.get("/metrics")).text
    found = re.findall(r'^gateway_requests_total\{.*code="(?:TOKENS?|APP_BACKEND)_.*\} (\S+)$', metrics, re.M)
    return sum(map(float, found))


@pytest.mark.parametrize("kind", ["no token", "an unknown kid", "a bad signature", "no kid"])
async def test_garbage_tokens(bystander: Bystander, backend: FakeAppBackend, kind: str) -> None:
    hostile = await bystander.gateway.app(backend)
    kids = {"an unknown kid": {"kid": "nobody"}, "a bad signature": {"kid": backend.keys["ES256"][0]}}
    token = make_garbage_token({"alg": "ES256", **kids.get(kind, {})}, SIGNATURES["ES256"])
    headers = [] if kind == "no token" else [f"Authorization: Bearer {token}"]
    async with run_attack(bystander.gateway, "flood", 20, request(hostile.path, b"{}", *headers)):
        refused = await count_refusals(bystander.gateway)
        during = await measure_app(bystander.app)
        rate = (await count_refusals(bystander.gateway) - refused) / SECONDS
    assert rate > 300, "the attack was too slow to count"
    report_row(f"1,000 requests per second with {kind}", bystander.before, during)
    assert_unharmed(bystander.before, during)
