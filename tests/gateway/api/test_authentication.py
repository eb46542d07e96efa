"""The credential is checked before everything else, so a request without one reveals nothing."""

from typing import Any

import httpx
import pytest

from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.operations import OPERATIONS
from tests.support.responses import refused
from tests.support.visitor import Visitor

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


WRONG = ["", "Bearer", "Bearer " + "x" * 5_000, f"Basic {OPERATOR}", OPERATOR]
WRONG += [f"Bearer {OPERATOR}x", f"Bearer {OPERATOR[:-1]}", "Bearer csk_nobody"]


@pytest.mark.parametrize(("method", "path", "accepted"), OPERATIONS, ids=lambda value: str(value))
async def test_an_invalid_body_without_a_credential_gets_401(
    gw: Gateway, method: str, path: str, accepted: list[str]
) -> None:
    """Each of the wrong credentials, and a key that nobody has with each of the bodies."""
    others = {"operatorToken": OPERATOR, "apiKey": (await gw.account()).key}
    wrong = [*WRONG, *(f"Bearer {credential}" for kind, credential in others.items() if kind not in accepted)]
    names = [*BODIES]
    longest = max(len(wrong), len(names))
    pairs = [(wrong[number % len(wrong)], names[number % len(names)]) for number in range(longest)]
    pairs += [("Bearer csk_nobody", name) for name in names]  # a key that has to be looked up
    for authorization, name in pairs:
        headers = {**BODIES[name].get("headers", {}), **({"Authorization": authorization} if authorization else {})}
        try:
            response = await gw.http.request(method, path, **{**BODIES[name], "headers": headers})
        except httpx.WriteError:
            continue  # the response arrived and the connection closed before the whole body was sent
        refused(response, 401, "UNAUTHORIZED")
        assert response.headers["WWW-Authenticate"] == "Bearer", (authorization, name)


async def test_an_invalid_body_from_another_site_gets_403(gw: Gateway, visitor: Visitor) -> None:
    """The origin of a session's request is checked before the body, too."""
    await visitor.log_in((await gw.account()).key)
    await visitor.log_in_as_operator()
    foreign = {"Origin": "http://demo.apps.localhost", "Content-Type": "application/json"}
    tried = [(method, path) for method, path, _ in OPERATIONS if method != "GET"]
    assert {path.split("/")[1] for _, path in tried} >= {"account", "platform"}
    for method, path in tried:
        refused(await visitor.http.request(method, path, content=b"{", headers=foreign), 403, "CSRF_REFUSED")
