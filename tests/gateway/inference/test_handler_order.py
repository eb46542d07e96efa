"""Each outcome masks all that follow it: app → origin → JWT → app rate → user rate → cap → body.

Availability precedes all of them: see `test_availability_switches.py`.
"""

from typing import Any

import httpx
import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk
from tests.fakes.server import CLOSE
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.prices import max_cost
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVIL = {"Origin": "https://evil.example"}
BODIES: dict[str, dict[str, Any]] = {
    "malformed": {"content": b"{"},
    "too large": {"content": b"x" * 150_000},
    "a picture": {"content": b"\x89PNG", "type": "image/png"},
    "unknown model": {"content": b'{"prompt":"x","model":"gpt-5"}'},
    "fine": {"content": b'{"prompt":"x"}'},
}


async def send(app: App, body: str, **headers: str) -> httpx.Response:
    fault = BODIES[body]
    headers = {"Content-Type": fault.get("type", "application/json"), **headers}
    return await app.post(content=fault["content"], headers=headers)


@pytest.mark.parametrize("body", BODIES)
async def test_app_then_origin_then_token(gw: Gateway, app: App, body: str) -> None:
    nobody = App(app.account, "nobody-here", app.backend)
    refused(await send(nobody, body, **EVIL), 404, "APP_NOT_FOUND")
    refused(await send(app, body, **EVIL, Authorization="Bearer x"), 403, "ORIGIN_NOT_ALLOWED")
    refused(await send(app, body), 401, "TOKEN_MISSING")
    refused(await send(app, body, Authorization="Bearer x"), 401, "TOKEN_INVALID")


async def test_token_then_app_rate_then_user_rate(app: App) -> None:
    for user, count in (("ana", 20), ("ben", 10)):
        for _ in range(count):
            refused(await app.post({}, headers=app.headers(app.token(user))), 400, "REQUEST_MALFORMED")
    for body in BODIES:
        refused(await send(app, body, Authorization="Bearer x"), 401, "TOKEN_INVALID")
        for user in ("ana", "ben", "eve"):
            refused(await send(app, body, **app.headers(app.token(user))), 429, "APP_RATE_LIMITED")


async def test_user_rate_then_cap_then_body(low_caps: Gateway, backend: FakeAppBackend, provider: FakeProvider) -> None:
    app = await low_caps.app(backend, "free")
    for _ in range(19):
        refused(await app.post({}), 400, "REQUEST_MALFORMED")
    filling = provider.plays(ROLE, chunk("x"), CLOSE, prompt="f" * 3744)
    assert max_cost(filling, 1000) == 1_200_000
    refused(await app.ask(filling, maxTokens=1000), 502, "PROVIDER_ERROR")
    assert await app.account.settled() == 1_200_000
    for body in BODIES:
        refused(await send(app, body, **app.headers()), 429, "USER_RATE_LIMITED")
        refused(await send(app, body, **app.headers(app.token("ben"))), 402, "SPEND_CAP_REACHED")
