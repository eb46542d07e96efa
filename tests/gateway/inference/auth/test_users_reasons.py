"""Why a token was refused: the app's owner sees it in the log and in a check; users get one code."""

from typing import Any

import pytest

from gateway.errors import AppBackendUnreachable, ServiceError, TokenInvalid
from tests.fakes import FakeAppBackend
from tests.gateway.inference.auth.verifier import sign
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def check(app: App, token: str) -> dict[str, Any]:
    answer = await app.account.call("POST", f"/account/apps/{app.name}/token-check", {"token": token})
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() == {"valid", "reason", "user", "claims"}
    return answer.json()


async def reason(app: App, token: str, status: int = 401) -> str:
    """Returns the reason in the log of the app's owner, which must be the same in a check."""
    kind: type[ServiceError] = {401: TokenInvalid, 503: AppBackendUnreachable}[status]
    response, code = await app.ask("x", token=token), kind.code
    assert refused(response, status, code)["message"] == kind.message
    found = await check(app, token)
    assert (found["valid"], found["user"]) == (False, None)

    async def row() -> dict[str, Any] | None:
        rows = (await app.account.get(f"/account/requests?code={code}")).json()
        return next((row for row in rows if row["id"] == response.headers["X-Request-Id"]), None)

    logged = (await wait_until(row, 10))["reason"]
    assert logged == found["reason"]
    return logged


async def test_a_refused_token(app: App) -> None:
    assert await reason(app, app.token(expires=-60)) == "expired"
    assert await reason(app, "no.token.at.all") == "malformed"
    assert await reason(app, "x" * 9_000) == "malformed"


async def test_a_backend_that_is_away(gw: Gateway) -> None:
    async with FakeAppBackend() as backend:
        app = await gw.app(backend)
    assert await reason(app, app.token(), 503) == "backend-unreachable"


async def test_a_request_without_a_fault_of_its_token_has_no_reason(app: App) -> None:
    assert (await app.ask("x")).status_code == 200
    refused(await app.ask("x", maxTokens=0), 400, "REQUEST_MALFORMED")
    refused(await app.post({"prompt": "x"}, headers={}), 401, "TOKEN_MISSING")

    async def rows() -> list[dict[str, Any]] | None:
        found = (await app.account.get("/account/requests")).json()
        return found if len(found) == 3 else None

    assert [row["reason"] for row in await wait_until(rows, 10)] == [None] * 3


# -- checks of tokens ----------------------------------------------------------------------------------------


async def test_a_valid_token(app: App) -> None:
    found = await check(app, f" {app.token('ana', role='editor')}\n")
    assert (found["valid"], found["reason"], found["user"]) == (True, None, "ana")
    assert found["claims"]["role"] == "editor"


async def test_a_test_token_of_the_app(app: App, gw: Gateway, backend: FakeAppBackend) -> None:
    made = await app.account.call("POST", f"/account/apps/{app.name}/test-token")
    token = made.json()["token"]
    found = await check(app, token)
    assert (found["valid"], found["user"], found["claims"]["sub"]) == (True, "owner", "owner")
    assert await reason(await app.account.app(backend), token) == "signature"


async def test_claims_are_shown_if_they_can_be_read(app: App) -> None:
    expired = await check(app, app.token(expires=-60, role="editor"))
    assert (expired["reason"], expired["claims"]["role"]) == ("expired", "editor")
    assert (await check(app, "x.y.z"))["claims"] is None
    lone = await check(app, sign(app.backend, rb'{"sub":"\ud800","exp":9999999999}'))
    assert (lone["reason"], lone["claims"]) == ("user", None)
    assert (await check(app, sign(app.backend, b'{"sub":"a","exp":9999999999,"n":NaN}')))["valid"]


async def test_a_check_keeps_nothing(app: App, gw: Gateway) -> None:
    token = app.token("a user of a check")
    assert (await check(app, token))["valid"]
    with gw.redis.client() as client:
        (key,) = [key for key in client.scan_iter() if b"token-check" in key and app.account.id.encode() in key]
        assert client.get(key) == b"1"
        assert 0 < client.ttl(key) <= 60
    assert (await app.account.get("/account/requests")).json() == []


async def test_ten_checks_per_minute(app: App, twin: Gateway) -> None:
    path = f"/account/apps/{app.name}/token-check"
    for n in range(10):
        body = {"token": app.token() if n else "x"}
        assert (await app.account.call("POST", path, body, at=twin if n % 2 else None)).status_code == 200
    refused(await app.account.call("POST", path, {"token": "x"}), 429, "RATE_LIMITED")
    assert (await app.ask("x")).status_code == 200
