"""A thousand requests a second that are refused for their token."""

import base64
import json
import re
import secrets

import pytest

from tests.fakes import FakeAppBackend
from tests.hostile.bystander import SECONDS, Bystander, assert_unharmed, attacked, measure, report
from tests.support.gateway_process import Gateway
from tests.support.raw_http import request

pytestmark = pytest.mark.asyncio(loop_scope="session")


def garbage(kid: str | None) -> str:
    """A token that looks right until its signature is checked."""
    header = {"alg": "ES256", **({"kid": kid} if kid else {})}
    parts = [json.dumps(header).encode(), json.dumps({"sub": "ana", "exp": 9_999_999_999}).encode()]
    encoded = [base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in [*parts, secrets.token_bytes(64)]]
    return ".".join(encoded)


async def refusals(gateway: Gateway) -> float:
    """Requests that got 401, 429 for too many bad tokens, or 503 for a key set, since the start."""
    metrics = (await gateway.http.get("/metrics")).text
    found = re.findall(r'^gateway_requests_total\{.*code="(?:TOKEN|APP_BACKEND|APP_RATE)_.*\} (\S+)$', metrics, re.M)
    return sum(map(float, found))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["no token", "an unknown kid", "a bad signature", "no kid"])
async def test_garbage_tokens(honest: Bystander, backend: FakeAppBackend, kind: str) -> None:
    hostile = await honest.gateway.app(backend)
    kid = {"an unknown kid": "nobody", "a bad signature": backend.keys["ES256"][0]}.get(kind)
    headers = [] if kind == "no token" else [f"Authorization: Bearer {garbage(kid)}"]
    async with attacked(honest.gateway, "flood", 20, request(hostile.path, b"{}", *headers)):
        refused = await refusals(honest.gateway)
        during = await measure(honest.app)
        rate = (await refusals(honest.gateway) - refused) / SECONDS
    assert rate > 300, "the attack was too slow to count"
    report(f"1,000 requests per second with {kind}", honest.before, during)
    assert_unharmed(honest.before, during)
