"""The credential is checked before everything else, so a request without one reveals nothing."""

from itertools import cycle
from typing import Any

import httpx
import pytest

from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.operations import list_operations
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


WRONG = ["", "Bearer", "Bearer " + "x" * 5_000, f"Basic {OPERATOR}", OPERATOR]
WRONG += [f"Bearer {OPERATOR}x", f"Bearer {OPERATOR[:-1]}", "Bearer csk_nobody"]


async def test_an_invalid_body_without_a_credential_gets_401(gw: Gateway) -> None:
    """Each operation with the credentials of others, and with some of the wrong ones and of the bodies in turn."""
    paths = {path for _, path, _ in list_operations()}
    assert paths >= {"/account/webhook/test", "/account/apps/x/source", "/platform/apps/x/findings"}
    credentials = {"operatorToken": OPERATOR, "apiKey": (await gw.account()).key}
    wrong, bodies = cycle(WRONG), cycle(BODIES.values())
    for method, path, accepted in list_operations():
        others = [f"Bearer {credential}" for kind, credential in credentials.items() if kind not in accepted]
        for authorization in (*others, "Bearer csk_nobody", next(wrong), next(wrong)):
            body = next(bodies)
            headers = {**body.get("headers", {}), **({"Authorization": authorization} if authorization else {})}
            try:
                response = await gw.http.request(method, path, **{**body, "headers": headers})
            except httpx.WriteError:
                continue  # the response arrived and the connection closed before the whole body was sent
            refused(response, 401, "UNAUTHORIZED")
            assert response.headers["WWW-Authenticate"] == "Bearer", (method, path, authorization)


async def test_an_invalid_body_from_another_site_gets_403(gw: Gateway, visitor: Visitor) -> None:
    """The origin of a session's request is checked before the body, too."""
    await visitor.log_in((await gw.account()).key)
    await visitor.log_in_as_operator()
    foreign = {"Origin": "http://demo.apps.localhost", "Content-Type": "application/json"}
    tried = [(method, path) for method, path, _ in list_operations() if method != "GET"]
    assert {path.split("/")[1] for _, path in tried} >= {"account", "platform"}
    for method, path in tried:
        refused(await visitor.http.request(method, path, content=b"{", headers=foreign), 403, "CSRF_REFUSED")
