"""The three kinds of `auth`, and the claim that names the user."""

from typing import Any

import jwt
import pytest

from gateway.outbound.client import Client
from tests.fakes import FakeAppBackend
from tests.fakes.server import CLOSE, HANG, Head, Script, answer
from tests.gateway.inference.auth.verifier import SECRET, Verifier, claims, sign
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.responses import counted, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def remaining(app: App, token: str) -> int:
    response = await app.ask("Who am I?", token=token)
    assert response.status_code == 200, response.text
    return counted(response)[1]


# -- the header --------------------------------------------------------------------------------------------------


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


# -- users -------------------------------------------------------------------------------------------------------


async def test_two_tokens_of_one_user_are_one_user(app: App) -> None:
    assert await remaining(app, app.token("7", jti="1")) == 19
    assert await remaining(app, app.token("7", "RS256", jti="2")) == 18
    assert await remaining(app, sign(app.backend, claims(sub=7))) == 17
    assert await remaining(app, app.token("ben")) == 19


ISSUER, URI = "https://iss.example", "https://example.com/uid"
STRICT: dict[str, Any] = {"issuer": ISSUER, "audience": "ai"}
NOT_IDS: tuple[Any, ...] = (1.5, True, None, [7], {})

# The app's `auth`, the claims of a token that differ from `claims()`, and the user or the refusal.
CLAIMS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sub before id": ({}, {"sub": "u1", "id": "other"}, "u1"),
    "id without sub": ({}, {"sub": ..., "id": "u1"}, "u1"),
    "neither sub nor id": ({}, {"sub": ...}, "401 user"),
    "sub is null": ({}, {"sub": None, "id": "other"}, "other"),
    "sub is a number": ({}, {"sub": 7, "id": "other"}, "7"),
    "sub is a large negative number": ({}, {"sub": -(2**70), "jti": 5}, str(-(2**70))),
    "sub has half a character": ({}, {"sub": "\ud800"}, "401 user"),
    "sub is long": ({}, {"sub": "x" * 600}, "401 user"),
    **{f"sub is {value!r}": ({}, {"sub": value, "id": "other"}, "401 user") for value in NOT_IDS if value is not None},
    **{f"jti is {value!r}": ({}, {"jti": value}, "401 malformed") for value in NOT_IDS},
    "another claim": ({"userClaim": "email"}, {"sub": "a", "email": "e@example.org"}, "e@example.org"),
    "a claim with dots in its name": ({"userClaim": URI}, {URI: "ben"}, "ben"),
    "a path with the same dots": ({"userClaim": URI}, {"https://example": {"com/uid": "ben"}}, "ben"),
    "neither the name nor the path": ({"userClaim": URI}, {}, "401 user"),
    **{
        f"a user named {value!r}": ({"userClaim": "who"}, {"who": value}, "401 user")
        for value in ("", ["ana"], {"id": "ana"})
    },
    "issuer and audience": (STRICT, {"iss": ISSUER, "aud": "ai"}, "ana"),
    "one of several audiences": (STRICT, {"iss": ISSUER, "aud": ["web", "ai"]}, "ana"),
    "another audience": (STRICT, {"iss": ISSUER, "aud": "web"}, "401 audience"),
    "no audience": (STRICT, {"iss": ISSUER}, "401 audience"),
    "another issuer": (STRICT, {"iss": "https://evil.example", "aud": "ai"}, "401 issuer"),
    "an issuer with one slash more": (STRICT, {"iss": f"{ISSUER}/", "aud": "ai"}, "401 issuer"),
    "no issuer": (STRICT, {"aud": "ai"}, "401 issuer"),
    "an audience that the app does not name": ({}, {"aud": "authenticated", "iss": "anyone"}, "ana"),
}


@pytest.mark.parametrize("case", CLAIMS)
async def test_the_claims(verifier: Verifier, case: str) -> None:
    auth, changes, verdict = CLAIMS[case]
    token = sign(verifier.backend, claims(**changes))
    assert await verifier.verdict(token, verifier.key_set(**auth)) == verdict


# -- key sets and secrets ----------------------------------------------------------------------------------------

RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
ALGORITHMS = (*RSA, "ES256", "ES384", "ES512", "EdDSA", "Ed25519")


async def test_every_algorithm() -> None:
    async with FakeAppBackend(*ALGORITHMS) as backend, Client(allow_private=True) as http:
        verifier = Verifier(http, backend)
        for alg in ALGORITHMS:
            assert await verifier.verdict(backend.token(alg, alg)) == alg
        assert backend.fetches == 1


@pytest.mark.filterwarnings("ignore:The HMAC key")
async def test_a_secret(verifier: Verifier) -> None:
    token = verifier.backend.token
    for given, verdict in {
        token(alg="HS256", key=SECRET): "ana",
        token(alg="HS512", key=SECRET): "ana",
        token(alg="HS256", key="b" + SECRET): "401 signature",
        token(alg="HS256", key=SECRET, expires=None): "401 malformed",
        token(alg="HS256", key=SECRET, expires=-60): "401 expired",
        token(): "401 algorithm",
        jwt.encode(claims(), "", algorithm="none"): "401 algorithm",
    }.items():
        assert await verifier.verdict(given, verifier.secret()) == verdict


async def test_a_short_secret_is_refused(gw: Gateway) -> None:
    account = await gw.account()
    for secret in ("", "x" * 31, None, 5):
        body = {"account": account.id, "auth": {"kind": "secret", "secret": secret}}
        error = refused(await gw.platform("PUT", "apps/short-secret", body), 400, "REQUEST_MALFORMED")
        assert "secret" in error["message"]
    body = {"account": account.id, "auth": {"kind": "secret", "secret": "ü" * 16}}
    assert (await gw.platform("PUT", "apps/short-secret", body)).status_code < 300


# -- backends ----------------------------------------------------------------------------------------------------


async def test_backend(gw: Gateway) -> None:
    async with FakeAppBackend() as backend:
        auth = {"kind": "backend", "url": backend.refresh_url, "method": "POST", "userField": "record.id"}
        app = await gw.app(backend, auth=auth)
        token = app.token("ana")
        assert await remaining(app, token) == 19
        assert await remaining(app, app.token("ana", jti="2")) == 18
        assert await remaining(app, app.token("ben")) == 19
        assert backend.refreshes == 3
        assert await remaining(app, token) == 17
        assert backend.refreshes == 3, "a verified token is remembered"
        refused(await app.ask("x", token=FakeAppBackend().token("ana")), 401, "TOKEN_INVALID")


@pytest.mark.parametrize(
    ("token", "verdict"),
    [
        ("not-a-jwt", "401 malformed"),
        (FakeAppBackend().token(expires=None), "401 malformed"),
        (FakeAppBackend().token(expires=-60), "401 expired"),
    ],
    ids=["not a token", "without an end", "expired"],
)
async def test_a_token_that_needs_no_call(alone: Verifier, token: str, verdict: str) -> None:
    assert await alone.verdict(token, alone.pocketbase()) == verdict
    assert alone.backend.connections == 0


ANSWERS: dict[str, tuple[Script, str]] = {
    **{str(status): (answer(status, {"message": "no"}), "401 backend-status") for status in (400, 401, 404)},
    "500": (answer(500), "503 backend-status"),
    "no user": (answer(200, {"record": {}}), "401 user"),
    "another shape": (answer(200, ["record", "id"]), "401 user"),
    "an object for the user": (answer(200, {"record": {"id": {"a": 1}}}), "401 user"),
    "not JSON": (answer(200, b"<html>"), "401 user"),
    "empty": (answer(204), "401 user"),
    "closed": ([CLOSE], "503 backend-unreachable"),
    "silent": ([HANG], "503 backend-unreachable"),
    "a redirect": (answer(307, b"", {"Location": "http://127.0.0.1:1/"}), "503 backend-status"),
    "megabytes": (
        [Head(200, {"Content-Type": "application/json"}), *[b"[" * 65536] * 256],
        "503 backend-unreachable",
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_the_answer_of_a_backend(alone: Verifier, case: str) -> None:
    backend = alone.backend
    backend.refresh, verdict = ANSWERS[case]
    assert await alone.verdict(backend.token(), alone.pocketbase()) == verdict
    assert backend.exchanges[-1].written < 8 * 2**20
    backend.refresh = None
    assert await alone.verdict(backend.token("ben"), alone.pocketbase()) == "ben"
