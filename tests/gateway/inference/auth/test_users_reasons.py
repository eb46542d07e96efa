"""Why a token was refused: the app's owner sees it in the log and in a check; users get one code."""

import base64
import json
from typing import Any

import jwt
import pytest

from gateway.errors import AppBackendUnreachable, ServiceError, TokenInvalid
from tests.fakes import FakeAppBackend
from tests.fakes.backend import private_key, public_pem
from tests.fakes.server import CLOSE, Script, answer
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECRET = "a shared secret of at least thirty-two bytes, sandpiper"
ISSUER, AUDIENCE = "https://iss.example", "ai"
GOOD = {"iss": ISSUER, "aud": AUDIENCE}


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


def forge(token: str) -> str:
    """Returns the token with the signature of another one."""
    head, payload, _ = token.split(".")
    return f"{head}.{payload}.{FakeAppBackend().token().rpartition('.')[2]}"


def unsigned(claims: dict[str, Any]) -> str:
    return jwt.encode({"sub": "ana", "exp": 2**33, **claims}, "", algorithm="none")


def signed_text(backend: FakeAppBackend, payload: bytes) -> str:
    """Signs a payload that need not be JSON."""
    kid, key = backend.keys["RS256"]
    head = json.dumps({"alg": "RS256", "kid": kid}).encode()
    text = ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (head, payload))
    signature = jwt.get_algorithm_by_name("RS256").sign(text.encode(), key)
    return f"{text}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


async def test_claims_of_a_key_sets_token(gw: Gateway, backend: FakeAppBackend) -> None:
    auth = {"kind": "jwks", "url": backend.jwks_url, "issuer": ISSUER, "audience": AUDIENCE}
    app = await gw.app(backend, auth=auth)
    cases = {
        app.token(**GOOD, expires=-60): "expired",
        app.token(**GOOD, nbf=2**32): "not-yet",
        app.token(**GOOD | {"aud": "web"}): "audience",
        app.token(iss=ISSUER): "audience",
        app.token(**GOOD | {"iss": "https://evil.example"}): "issuer",
        app.token(**GOOD, expires=None): "malformed",
        app.token(None, **GOOD): "user",
        app.token("x" * 600, **GOOD): "user",
    }
    assert {token: await reason(app, token) for token in cases} == cases


async def test_the_header_and_the_signature(gw: Gateway, backend: FakeAppBackend) -> None:
    """They come before the claims, which anyone can write into a token that does not verify."""
    app = await gw.app(backend)
    mallory = FakeAppBackend()
    cases = {
        forge(app.token(expires=-60)): "signature",
        app.token(key=mallory.keys["ES256"][1], expires=None): "signature",
        mallory.token(expires=-60): "unknown-key",
        unsigned({"exp": 5}): "algorithm",
        app.token(alg="HS256", key=SECRET, headers={"kid": backend.keys["ES256"][0]}): "algorithm",
        app.token(headers={"kid": None, "crit": ["exp"]}): "malformed",
        "no.token.at.all": "malformed",
        "x" * 9_000: "malformed",
        signed_text(backend, b"[1]"): "malformed",
    }
    assert {token: await reason(app, token) for token in cases} == cases


@pytest.mark.filterwarnings("ignore:The HMAC key")
async def test_a_shared_secret(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend, auth={"kind": "secret", "secret": SECRET})
    gw.confidential.add(SECRET)
    cases = {
        app.token(alg="HS256", key="b" + SECRET, expires=-60): "signature",
        app.token(alg="HS256", key=SECRET, expires=-60): "expired",
        app.token(alg="HS256", key=public_pem(private_key("ES256")).hex()): "signature",
        app.token(): "algorithm",
    }
    assert {token: await reason(app, token) for token in cases} == cases


FAULTS: dict[str, tuple[Script, int, str]] = {
    "500": (answer(500), 503, "backend-status"),
    "404": (answer(404), 503, "backend-status"),
    "closed": ([CLOSE], 503, "backend-unreachable"),
    "HTML": (answer(200, b"<html>"), 503, "keys-unreadable"),
    "megabytes": (answer(200, b" " * 300_000), 503, "keys-unreadable"),
    "no keys": (answer(200, {"keys": []}), 401, "keys-unreadable"),
    "no usable key": (answer(200, {"keys": [{"kty": "oct", "k": "AA"}, {}]}), 401, "keys-unreadable"),
}


@pytest.mark.parametrize("case", FAULTS)
async def test_a_faulty_key_set(gw: Gateway, case: str) -> None:
    async with FakeAppBackend() as backend:
        app = await gw.app(backend)
        backend.jwks, status, expected = FAULTS[case]
        assert await reason(app, app.token(expires=-60), status) == expected


async def test_a_backend_that_is_away(gw: Gateway) -> None:
    async with FakeAppBackend() as backend:
        app = await gw.app(backend)
    assert await reason(app, app.token(), 503) == "backend-unreachable"


async def test_an_apps_backend(gw: Gateway) -> None:
    async with FakeAppBackend() as backend:
        auth = {"kind": "backend", "url": backend.refresh_url, "method": "POST", "userField": "record.id"}
        app = await gw.app(backend, auth=auth)
        assert (await check(app, app.token()))["user"] == "ana"
        assert await reason(app, forge(app.token())) == "backend-status"
        assert await reason(app, app.token(expires=-60)) == "expired"
        assert await reason(app, app.token(expires=None)) == "malformed"
        backend.refresh = answer(200, {"record": {}})
        assert await reason(app, app.token("ben")) == "user"
        backend.refresh = answer(500)
        assert await reason(app, app.token("eve"), 503) == "backend-status"


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
    lone = await check(app, signed_text(app.backend, rb'{"sub":"\ud800","exp":9999999999}'))
    assert (lone["reason"], lone["claims"]) == ("user", None)
    assert (await check(app, signed_text(app.backend, b'{"sub":"a","exp":9999999999,"n":NaN}')))["valid"]


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


@pytest.mark.parametrize("body", [{}, {"token": ""}, {"token": 5}, {"token": "x", "app": "y"}, []])
async def test_other_bodies(app: App, body: Any) -> None:
    answer = await app.account.call("POST", f"/account/apps/{app.name}/token-check", body)
    refused(answer, 400, "REQUEST_MALFORMED")


async def test_another_accounts_app(app: App, gw: Gateway) -> None:
    path, stranger = f"/account/apps/{app.name}/token-check", await gw.account()
    refused(await stranger.call("POST", path, {"token": app.token()}), 404, "NOT_FOUND")
    assert (await gw.http.post(path, json={"token": "x"})).status_code == 401
