"""Forged tokens, made as attackers make them."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from gateway.errors import TokenFault
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.backend import jwk, private_key, public_pem
from tests.fakes.provider import tokens
from tests.gateway.inference.auth.verifier import Verifier, b64, claims, sign
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


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
RSA = private_key("RS256")

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
        "kid is a path": lambda b: MALLORY.token(headers={"kid": "../../../../dev/null"}),
    },
    "signature": {
        "another's key under our kid": lambda b: MALLORY.token(headers=kid_of(b)),
        "an attacker's RSA key": lambda b: b.token(alg="RS256", key=RSA, headers=kid_of(b, "RS256")),
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
    "expired": {
        "expired": lambda b: b.token(expires=-15),
    },
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
        "dots": lambda b: "..",
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
