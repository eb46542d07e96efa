"""The credential is checked before everything else, so a request without one reveals nothing."""

from typing import Any

import httpx
import pytest

from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.operations import OPERATIONS
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Bodies that cannot be parsed, have an unknown field or a wrong type, or are too large.
BODIES: dict[str, dict[str, Any]] = {
    "none": {},
    "not JSON": {"content": b"{", "headers": {"Content-Type": "application/json"}},
    "not UTF-8": {"content": b"\xff\xfe", "headers": {"Content-Type": "application/json"}},
    "nested deeply": {"content": b"[" * 50_000, "headers": {"Content-Type": "application/json"}},
    "an unknown field": {"json": {"surprise": 1}},
    "another type": {"content": b"<a/>", "headers": {"Content-Type": "text/xml"}},
    "a form without a boundary": {"content": b"x", "headers": {"Content-Type": "multipart/form-data"}},
    "too large": {"content": b" " * 1_100_000, "headers": {"Content-Type": "application/json"}},
    "no number": {"params": {"limit": "x", "state": "x"}},
}


async def test_the_whole_api_is_covered() -> None:
    assert len(OPERATIONS) > 30
    covered = {(method, path) for method, path, _ in OPERATIONS}
    for known in (
        ("PUT", "/account/webhook"),
        ("POST", "/account/webhook/test"),
        ("POST", "/account/apps/x/hooks"),
        ("PUT", "/account/apps/x/source"),
        ("GET", "/account/deliveries/x"),
        ("POST", "/account/deliveries/x/redeliver"),
        ("POST", "/platform/apps/x/findings"),
        ("PUT", "/platform/inference"),
    ):
        assert known in covered


@pytest.mark.parametrize(("method", "path", "accepted"), OPERATIONS, ids=lambda value: str(value))
async def test_an_invalid_body_without_a_credential_gets_401(
    gw: Gateway, method: str, path: str, accepted: list[str]
) -> None:
    wrong = ["", "Bearer csk_nobody", f"Basic {OPERATOR}"]
    wrong += [] if "operatorToken" in accepted else [f"Bearer {OPERATOR}"]
    for authorization in wrong:
        for name, request in BODIES.items():
            headers = {**request.get("headers", {}), **({"Authorization": authorization} if authorization else {})}
            try:
                response = await gw.http.request(method, path, **{**request, "headers": headers})
            except httpx.WriteError:
                continue  # the response arrived and the connection closed before the whole body was sent
            refused(response, 401, "UNAUTHORIZED")
            assert response.headers["WWW-Authenticate"] == "Bearer", name


async def test_an_invalid_body_from_another_site_gets_403(gw: Gateway) -> None:
    """The origin of a session's request is checked before the body, too."""
    account = await gw.account()
    own = {"Origin": gw.address, "X-Forwarded-For": "198.51.100.9"}
    async with httpx.AsyncClient(base_url=gw.address, trust_env=False) as browser:
        opened = await browser.post("/dashboard/session", json={"apiKey": account.key}, headers=own)
        assert opened.status_code == 204
        gw.confidential.add(opened.cookies["capsule_session"])
        for method, path, accepted in OPERATIONS:
            if "apiKey" in accepted and method != "GET":
                foreign = {"Origin": "https://evil.example", "Content-Type": "application/json"}
                response = await browser.request(method, path, content=b"{", headers=foreign)
                refused(response, 403, "CSRF_REFUSED")
