"""Who a request is of: the header, the claims, forged tokens, and the reasons of refusals."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from gateway.accounts.records import SecretAuth
from gateway.errors import AppBackendUnreachable, ServiceError, TokenFault, TokenInvalid
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.backend import jwk, private_key, public_pem
from tests.fakes.provider import tokens
from tests.fakes.server import CLOSE, HANG, Head, Script, answer
from tests.gateway.inference.auth.conftest import SECRET, Verifier, b64, claims, sign
from tests.support.accounts import App
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import wait_until
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
    "sub is a large negative number": ({}, {"sub": -(2**70)}, str(-(2**70))),
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


@pytest.mark.filterwarnings("ignore:The HMAC key")
async def test_a_secret(verifier: Verifier) -> None:
    token = verifier.backend.token
    known = token(alg="HS256", key=SECRET)
    for given, verdict in {
        known: "ana",
        token(alg="HS512", key=SECRET): "ana",
        token(alg="HS256", key="b" + SECRET): "401 signature",
        token(alg="HS256", key=SECRET, expires=None): "401 malformed",
        token(alg="HS256", key=SECRET, expires=-60): "401 expired",
        token(): "401 algorithm",
        jwt.encode(claims(), "", algorithm="none"): "401 algorithm",
    }.items():
        assert await verifier.verdict(given, verifier.secret()) == verdict
    other = SecretAuth(secret=verifier.vault.seal("b" + SECRET))
    for auth, verdict in ((verifier.secret(), "ana"), (other, "401 signature")):
        assert await verifier.verdict(known, auth) == verdict, "it is cached for one app"


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


# -- forged tokens -----------------------------------------------------------------------------------------------


def unsigned(alg: Any, signature: str = "", **changes: Any) -> str:
    return f"{b64({'alg': alg, 'typ': 'JWT'})}.{b64(claims(**changes))}.{signature}"


def hmacked(backend: FakeAppBackend, secret: bytes) -> str:
    """Signs with HS256 and public data as the secret, under the `kid` of the public key."""
    signed = f"{b64({'alg': 'HS256', 'typ': 'JWT', **kid_of(backend)})}.{b64(claims())}"
    return f"{signed}.{b64(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


def der(key: Any) -> bytes:
    public = key.public_key()
    return public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def kid_of(backend: FakeAppBackend, alg: str = "ES256") -> dict[str, str]:
    return {"kid": backend.keys[alg][0]}


def tampered(token: str, **changes: Any) -> str:
    head, payload, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    return f"{head}.{b64(claims | changes)}.{signature}"


def resigned(token: str) -> str:
    """Returns the token with the signature of another one."""
    return token.rpartition(".")[0] + "." + FakeAppBackend().token().rpartition(".")[2]


MALLORY = FakeAppBackend()
FOREIGN_RSA = private_key("RS256")

Attack = Callable[[FakeAppBackend], str]
# By the reason of the refusal. Faults of the header and the signature come before those of the claims, which anyone can
# write into a token that does not verify.
ATTACKS: dict[TokenFault, dict[str, Attack]] = {
    "algorithm": {
        "none": lambda b: unsigned("none"),
        "unknown alg": lambda b: unsigned("XS256", "c2ln"),
        "HS256 with the PEM": lambda b: hmacked(b, public_pem(b.keys["ES256"][1])),
        "RSA under the kid of EC": lambda b: b.token(alg="RS256", headers=kid_of(b)),
        "another curve": lambda b: b.token(alg="ES384", key=private_key("ES384"), headers=kid_of(b)),
    },
    "unknown-key": {
        "another's key": lambda b: MALLORY.token(),
    },
    "signature": {
        "another's key under our kid": lambda b: MALLORY.token(headers=kid_of(b)),
        "an attacker's RSA key": lambda b: b.token(alg="RS256", key=FOREIGN_RSA, headers=kid_of(b, "RS256")),
        "an attacker's key in the header": lambda b: MALLORY.token(
            headers={**kid_of(b), "jwk": jwk("ES256", MALLORY.keys["ES256"][1], "k")}
        ),
        "a certificate in the header": lambda b: MALLORY.token(
            headers={**kid_of(b), "x5c": [b64(der(MALLORY.keys["ES256"][1]))]}
        ),
        "signature of zeros": lambda b: b.token().rpartition(".")[0] + "." + b64(bytes(64)),
        "no signature": lambda b: b.token().rpartition(".")[0] + ".",
        "expired, with another's signature": lambda b: resigned(b.token(expires=-60)),
        "a longer life": lambda b: tampered(b.token(expires=-60), exp=2**33),
    },
    "expired": {"expired": lambda b: b.token(expires=-15)},
    "not-yet": {"not yet": lambda b: b.token(nbf=int(time.time()) + 60)},
    "malformed": {
        "no exp": lambda b: b.token(expires=None),
        "exp is null": lambda b: b.token(expires=None, exp=None),
        "exp is text": lambda b: b.token(expires=None, exp="tomorrow"),
        "no alg": lambda b: f"{b64({'typ': 'JWT'})}.{b64(claims())}.c2ln",
        "alg is no text": lambda b: unsigned(5, "c2ln"),
        "critical extensions": lambda b: b.token(headers={"crit": ["cormorant"], "cormorant": True}),
        "kid of another type": lambda b: sign(b, claims(), kid=5),
        "two parts": lambda b: b.token().rpartition(".")[0],
        "not base64": lambda b: "!!!.???.***",
        "payload is no object": lambda b: sign(b, b'["ana"]'),
        "payload is not UTF-8": lambda b: sign(b, b'{"sub":"\xff"}'),
        "payload is deep": lambda b: sign(b, b'{"a":' * 900 + b"1" + b"}" * 900),
        "header is deep": lambda b: f"{b64(b'[' * 4000)}.{b64(claims())}.c2ln",
        "huge": lambda b: tampered(b.token(), padding="x" * 20_000),
    },
}


async def test_the_forger_can_sign(verifier: Verifier) -> None:
    """Shows that the signatures of the attacks are valid."""
    assert await verifier.verdict(sign(verifier.backend, claims())) == "ana"


@pytest.mark.parametrize(("reason", "attack"), [(reason, name) for reason, named in ATTACKS.items() for name in named])
async def test_attack(verifier: Verifier, reason: TokenFault, attack: str) -> None:
    assert await verifier.verdict(ATTACKS[reason][attack](verifier.backend)) == f"401 {reason}"


async def test_addresses_in_the_header_are_not_fetched(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("x"))
    async with FakeAppBackend() as mallory:
        for name in ("jku", "x5u"):
            header = {name: mallory.jwks_url, **kid_of(mallory)}
            error = refused(await app.ask(prompt, token=mallory.token(headers=header)), 401, "TOKEN_INVALID")
            assert "ana" not in error["message"].split()
        assert mallory.connections == 0
    assert provider.asked(prompt) == []


async def test_a_token_of_one_app_at_another(gw: Gateway, app: App) -> None:
    """It is refused even if both apps have a key with the same `kid`, and the token is cached for the first app."""
    async with FakeAppBackend("ES256") as theirs:
        theirs.keys["ES256"] = (app.backend.keys["ES256"][0], theirs.keys["ES256"][1])
        other = await gw.app(theirs)
        ours_token, their_token = app.token(), other.token()
        for _ in range(2):
            assert (await app.ask("x", token=ours_token)).status_code == 200
            assert (await other.ask("x", token=their_token)).status_code == 200
            refused(await app.ask("x", token=their_token), 401, "TOKEN_INVALID")
            refused(await other.ask("x", token=ours_token), 401, "TOKEN_INVALID")


async def test_a_token_for_one_audience_at_an_app_with_another(verifier: Verifier) -> None:
    """Both apps have the same backend and key set, and the token is cached for the first app."""
    token = verifier.backend.token(aud="web")
    for _ in range(2):
        assert await verifier.verdict(token, verifier.key_set(audience="web")) == "ana"
        assert await verifier.verdict(token, verifier.key_set(audience="ai")) == "401 audience"


async def test_leeway_and_memory_end_with_the_token(app: App) -> None:
    """The leeway is ten seconds, and the cache does not extend it."""
    token = app.token(expires=-8)
    assert (await app.ask("x", token=token)).status_code == 200

    async def over() -> bool:
        return (await app.ask("x", token=token)).status_code == 401

    await wait_until(over, 12, 0.3)


# -- the app's own address ---------------------------------------------------------------------------------------

KEYS = {"kind": "jwks", "url": "/.well-known/jwks.json"}
CALL = {"kind": "backend", "url": "/api/collections/users/auth-refresh", "method": "POST", "userField": "record.id"}


@module_fixture
async def apps() -> AsyncIterator[FakeAppBackend]:
    """Answers at the address of every app."""
    async with FakeAppBackend() as backend:
        yield backend


@module_fixture
async def strict(
    provider: FakeProvider, apps: FakeAppBackend, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A gateway that refuses customers' private addresses, as in production."""
    settings = {"GATEWAY_ALLOW_PRIVATE_ADDRESSES": "false", "GATEWAY_APPS_URL": f"http://{{host}}:{apps.port}"}
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("strict"), **settings) as running:
        yield running


@pytest.mark.parametrize("auth", [KEYS, CALL], ids=["jwks", "backend"])
async def test_an_app_verifies_its_users_itself(strict: Gateway, apps: FakeAppBackend, auth: dict[str, str]) -> None:
    app = await strict.app(apps, auth=auth)
    assert (await app.ask("x")).status_code == 200
    assert apps.exchanges[-1].header("host") == f"{app.name}.apps.localhost:{apps.port}"
    refused(await app.ask("x", token=FakeAppBackend().token()), 401, "TOKEN_INVALID")
    shown = await app.account.call("GET", f"/account/apps/{app.name}/settings")
    assert shown.json()["auth"]["url"] == auth["url"]


async def test_other_addresses_stay_refused(strict: Gateway, apps: FakeAppBackend) -> None:
    app = await strict.app(apps, auth=KEYS)
    for url in ("http://example.com/keys", "//169.254.169.254/keys", "/\\169.254.169.254/keys", "/a b"):
        answer = await app.account.call("PATCH", f"/account/apps/{app.name}", {"auth": {"kind": "jwks", "url": url}})
        assert "auth.url" in refused(answer, 400, "REQUEST_MALFORMED")["message"]


@pytest.mark.parametrize("kind", ["jwks", "backend"])
async def test_an_address_that_is_not_public_is_saved_and_named(
    strict: Gateway, backend: FakeAppBackend, kind: str
) -> None:
    app = await strict.app(backend, auth={"kind": "jwks"})
    fetches = backend.fetches
    for url in ("https://169.254.169.254/keys", "https://[::1]/", "https://keys.internal/", backend.jwks_url):
        auth = {"kind": kind, "url": url}
        saved = (await app.account.call("PATCH", f"/account/apps/{app.name}", {"auth": auth})).json()
        assert saved["auth"] == auth
        assert "not public" in saved["authCheck"]["problem"]
    refused(await app.ask("x"), 503, "APP_BACKEND_UNREACHABLE")
    assert backend.fetches == fetches


# -- reasons -----------------------------------------------------------------------------------------------------


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


async def test_ten_checks_per_minute(app: App, twin: Gateway) -> None:
    path = f"/account/apps/{app.name}/token-check"
    for n in range(10):
        body = {"token": app.token() if n else "x"}
        assert (await app.account.call("POST", path, body, at=twin if n % 2 else None)).status_code == 200
    refused(await app.account.call("POST", path, {"token": "x"}), 429, "RATE_LIMITED")
    assert (await app.ask("x")).status_code == 200
