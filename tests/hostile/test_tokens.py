"""A thousand requests per second with invalid tokens do not delay the bystander."""

import base64
import json
import re
import secrets

import pytest

from tests.fakes import FakeAppBackend
from tests.hostile.bystander import SECONDS, Bystander, assert_unharmed, measure_app, report_row, run_attack
from tests.support.gateway_process import Gateway
from tests.support.raw_http import request

pytestmark = pytest.mark.asyncio(loop_scope="session")


def make_garbage_token(kid: str | None) -> str:
    """Returns a well-formed token with a wrong signature."""
    header = {"alg": "ES256", **({"kid": kid} if kid else {})}
    parts = [json.dumps(header).encode(), json.dumps({"sub": "ana", "exp": 9_999_999_999}).encode()]
    encoded = [base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in [*parts, secrets.token_bytes(64)]]
    return ".".join(encoded)


async def count_refusals(gateway: Gateway) -> float:
    """Returns how many requests got 401, 429 for too many bad tokens, or 503 for a key set, since the start."""
    metrics = (await gateway.http.get("/metrics")).text
    found = re.findall(r'^gateway_requests_total\{.*code="(?:TOKENS?|APP_BACKEND)_.*\} (\S+)$', metrics, re.M)
    return sum(map(float, found))


@pytest.mark.parametrize("kind", ["no token", "an unknown kid", "a bad signature", "no kid"])
async def test_garbage_tokens(bystander: Bystander, backend: FakeAppBackend, kind: str) -> None:
    hostile = await bystander.gateway.app(backend)
    kid = {"an unknown kid": "nobody", "a bad signature": backend.keys["ES256"][0]}.get(kind)
    headers = [] if kind == "no token" else [f"Authorization: Bearer {make_garbage_token(kid)}"]
    async with run_attack(bystander.gateway, "flood", 20, request(hostile.path, b"{}", *headers)):
        refused = await count_refusals(bystander.gateway)
        during = await measure_app(bystander.app)
        rate = (await count_refusals(bystander.gateway) - refused) / SECONDS
    assert rate > 300, "the attack was too slow to count"
    report_row(f"1,000 requests per second with {kind}", bystander.before, during)
    assert_unharmed(bystander.before, during)
