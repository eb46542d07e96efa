"""The three kinds of `auth`, and the claim that names the user."""

import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import jwt
import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.fakes.server import Head, answer
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import counted, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECRET = "a shared secret of at least thirty-two bytes, cormorant"


async def remaining(app: App, token: str) -> int:
    response = await app.ask("Who am I?", token=token)
    assert response.status_code == 200, response.text
    return counted(response)[1]


RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
ALGORITHMS = (*RSA, "ES256", "ES384", "ES512", "EdDSA", "Ed25519")


async def test_every_algorithm(gw: Gateway) -> None:
    async with FakeAppBackend(*ALGORITHMS) as backend:
        app = await gw.app(backend)
        for alg in ALGORITHMS:
            response = await app.ask("Hello", token=app.token(alg, alg))
            assert response.status_code == 200, (alg, response.text)
        assert backend.fetches == 1


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Basic YW5hOmFuYQ==", "Token x", "Digest username=ana"],
)
async def test_no_token(app: App, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    error = refused(await app.post({"prompt": "x"}, headers=headers), 401, "TOKEN_MISSING")
    assert error["message"]


async def test_a_token_outside_the_header_does_not_count(app: App) -> None:
    token = app.token()
    headers = {"Cookie": f"token={token}", "X-Authorization": f"Bearer {token}"}
    response = await app.post({"prompt": "x"}, path=f"?token={token}&access_token={token}", headers=headers)
    refused(response, 401, "TOKEN_MISSING")


async def test_the_scheme_is_case_insensitive(app: App) -> None:
    for scheme in ("bearer", "BEARER"):
        headers = {"Authorization": f"{scheme} {app.token()}"}
        assert (await app.post({"prompt": "x"}, headers=headers)).status_code == 200


async def test_two_tokens_of_one_user_are_one_user(app: App) -> None:
    assert await remaining(app, app.token("ana", jti="1")) == 19
    assert await remaining(app, app.token("ana", "RS256", jti="2")) == 18
    assert await remaining(app, app.token("ben")) == 19


async def test_the_id_claim_is_used_if_there_is_no_sub(app: App) -> None:
    assert await remaining(app, app.token(None, id="u1")) == 19
    assert await remaining(app, app.token("u1", id="other")) == 18
    refused(await app.ask("x", token=app.token(None)), 401, "TOKEN_INVALID")


def signed(backend: FakeAppBackend, claims: dict[str, Any]) -> str:
    """Signs claims of types that PyJWT refuses to encode."""
    kid, key = backend.keys["RS256"]
    parts = [{"alg": "RS256", "kid": kid}, {"exp": 2**33, "id": "other", **claims}]
    text = ".".join(b64(json.dumps(part).encode()) for part in parts)
    return f"{text}.{b64(jwt.get_algorithm_by_name('RS256').sign(text.encode(), key))}"


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


async def test_integers_are_ids(app: App) -> None:
    assert await remaining(app, signed(app.backend, {"sub": 7})) == 19
    assert await remaining(app, signed(app.backend, {"sub": "7", "jti": 5})) == 18
    assert await remaining(app, signed(app.backend, {"sub": -(2**70), "jti": "a"})) == 19


@pytest.mark.parametrize("claim", ["sub", "jti"])
@pytest.mark.parametrize("value", [1.5, True, False, None, [7], {}])
async def test_values_that_are_not_ids(app: App, claim: str, value: Any) -> None:
    refused(await app.ask("x", token=signed(app.backend, {"sub": "ana", claim: value})), 401, "TOKEN_INVALID")


async def test_another_claim(gw: Gateway, backend: FakeAppBackend) -> None:
    auth = {"kind": "jwks", "url": backend.jwks_url, "userClaim": "email"}
    app = await gw.app(backend, auth=auth)
    assert await remaining(app, app.token("a", email="e@example.org")) == 19
    assert await remaining(app, app.token("b", email="e@example.org")) == 18
    refused(await app.ask("x", token=app.token("a")), 401, "TOKEN_INVALID")


@pytest.mark.parametrize("claims", [{"https://example.com/uid": "ana"}, {"https://example": {"com/uid": "ana"}}])
async def test_a_claim_with_a_dot_in_its_name(gw: Gateway, backend: FakeAppBackend, claims: dict[str, Any]) -> None:
    """It may also be a path."""
    auth = {"kind": "jwks", "url": backend.jwks_url, "userClaim": "https://example.com/uid"}
    app = await gw.app(backend, auth=auth)
    assert (await app.ask("x", token=app.token("a", **claims))).status_code == 200
    refused(await app.ask("x", token=app.token("a")), 401, "TOKEN_INVALID")


@pytest.mark.parametrize("claim", ["", None, [], {}, ["ana"], {"id": "ana"}])
async def test_a_user_must_have_a_name(app: App, claim: Any) -> None:
    auth = {"kind": "jwks", "url": app.backend.jwks_url, "userClaim": "who"}
    other = await app.gateway.app(app.backend, auth=auth)
    refused(await other.ask("x", token=other.token(who=claim)), 401, "TOKEN_INVALID")


async def test_issuer_and_audience(gw: Gateway, backend: FakeAppBackend) -> None:
    auth = {"kind": "jwks", "url": backend.jwks_url, "issuer": "https://iss.example", "audience": "ai"}
    app = await gw.app(backend, auth=auth)
    good = {"iss": "https://iss.example", "aud": "ai"}
    assert (await app.ask("x", token=app.token(**good))).status_code == 200
    assert (await app.ask("x", token=app.token(**good | {"aud": ["web", "ai"]}))).status_code == 200
    for bad in ({"iss": "https://evil.example"}, {"aud": "web"}, {"aud": []}, {"iss": "https://iss.example/"}):
        refused(await app.ask("x", token=app.token(**good | bad)), 401, "TOKEN_INVALID")
    for missing in ("iss", "aud"):
        claims = {k: v for k, v in good.items() if k != missing}
        refused(await app.ask("x", token=app.token(**claims)), 401, "TOKEN_INVALID")


async def test_an_unexpected_audience_is_accepted(app: App) -> None:
    assert (await app.ask("x", token=app.token(aud="authenticated", iss="anyone"))).status_code == 200


@pytest.mark.filterwarnings("ignore:The HMAC key")
async def test_secret(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend, auth={"kind": "secret", "secret": SECRET})
    gw.confidential.add(SECRET)
    for alg in ("HS256", "HS384", "HS512"):
        token = app.token("ana", alg, key=SECRET)
        assert (await app.ask("x", token=token)).status_code == 200, alg
    for token in (
        app.token("ana", "HS256", key="b" + SECRET),
        app.token("ana", "HS256", key=SECRET, expires=None),
        app.token("ana", "HS256", key=SECRET, expires=-60),
        app.token("ana", "ES256"),
        jwt.encode({"sub": "ana", "exp": 2**33}, "", algorithm="none"),
    ):
        refused(await app.ask("x", token=token), 401, "TOKEN_INVALID")


async def test_a_short_secret_is_refused(gw: Gateway) -> None:
    account = await gw.account()
    for secret in ("", "x" * 31, None, 5):
        body = {"account": account.id, "auth": {"kind": "secret", "secret": secret}}
        error = refused(await gw.platform("PUT", "apps/short-secret", body), 400, "REQUEST_MALFORMED")
        assert "secret" in error["message"]
    body = {"account": account.id, "auth": {"kind": "secret", "secret": "ü" * 16}}
    assert (await gw.platform("PUT", "apps/short-secret", body)).status_code < 300


@contextlib.asynccontextmanager
async def pocketbase(gw: Gateway) -> AsyncIterator[App]:
    async with FakeAppBackend() as backend:
        auth = {
            "kind": "backend",
            "url": backend.refresh_url,
            "method": "POST",
            "userField": "record.id",
        }
        yield await gw.app(backend, auth=auth)


async def test_backend(gw: Gateway, provider: FakeProvider) -> None:
    async with pocketbase(gw) as app:
        token = app.token("ana")
        assert await remaining(app, token) == 19
        assert await remaining(app, app.token("ana", jti="2")) == 18
        assert await remaining(app, app.token("ben")) == 19
        seen = app.backend.refreshes
        assert seen == 3
        assert await remaining(app, token) == 17
        assert app.backend.refreshes == seen, "a verified token is remembered"
        stranger = FakeAppBackend().token("ana")
        refused(await app.ask("x", token=stranger), 401, "TOKEN_INVALID")
        refused(await app.ask("x", token="not-a-jwt"), 401, "TOKEN_INVALID")


@pytest.mark.parametrize("status", [400, 401, 403, 404])
async def test_a_backend_that_refuses(gw: Gateway, status: int) -> None:
    async with pocketbase(gw) as app:
        app.backend.refresh = answer(status, {"message": "no"})
        refused(await app.ask("x"), 401, "TOKEN_INVALID")


async def test_a_backend_that_fails(gw: Gateway) -> None:
    async with pocketbase(gw) as app:
        app.backend.refresh = answer(500)
        refused(await app.ask("x"), 503, "APP_BACKEND_UNREACHABLE")
        app.backend.refresh = None
        assert await wait_until(lambda: passes(app), 12, 0.5)


async def passes(app: App) -> bool:
    return (await app.ask("x")).status_code == 200


async def test_a_backend_that_is_down(gw: Gateway) -> None:
    async with pocketbase(gw) as app:
        pass
    refused(await app.ask("x"), 503, "APP_BACKEND_UNREACHABLE")


ODD = {
    "no user": answer(200, {"record": {}}),
    "another shape": answer(200, ["record", "id"]),
    "an object for the user": answer(200, {"record": {"id": {"a": 1}}}),
    "not JSON": answer(200, b"<html>"),
    "empty": answer(204),
    "megabytes": [Head(200, {"Content-Type": "application/json"}), *[b"[" * 65536] * 256],
}


@pytest.mark.parametrize("case", ODD)
async def test_a_backend_that_answers_oddly(gw: Gateway, provider: FakeProvider, case: str) -> None:
    async with pocketbase(gw) as app:
        app.backend.refresh = ODD[case]
        prompt = provider.plays(tokens("x"))
        assert (await app.ask(prompt)).status_code in (401, 503)
        assert provider.asked(prompt) == []
        assert app.backend.exchanges[-1].written < 8 * 2**20


async def test_a_backend_that_redirects(gw: Gateway) -> None:
    async with pocketbase(gw) as app, FakeAppBackend() as elsewhere:
        app.backend.refresh = answer(307, b"", {"Location": elsewhere.refresh_url})
        assert (await app.ask("x", token=elsewhere.token())).status_code in (401, 503)
        assert elsewhere.exchanges == []
