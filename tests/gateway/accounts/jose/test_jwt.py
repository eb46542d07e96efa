"""Tokens are accepted and refused like in PyJWT, but faster."""

import base64
import json
import time
from typing import Any

import jwt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.accounts.jose import jwt as tokens
from gateway.accounts.jose.jwk import EDWARDS, RSA
from gateway.errors import TokenInvalid
from tests.fakes.backend import private_key

SECRET = b"a secret of more than 64 bytes, as HS512 asks for: 0123456789012345678901234567890"
HEADER = {"alg": "HS256", "typ": "JWT"}
NOW = int(time.time())
CLAIMS = {"sub": "ana", "exp": NOW + 3_600}
CHARACTERS = b"ABCxyz019-_+/= .!\n\x00\xff"


def b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def signed(signing_input: bytes) -> bytes:
    return signing_input + b"." + b64(jwt.get_algorithm_by_name("HS256").sign(signing_input, SECRET))


def made(header: bytes, payload: bytes) -> bytes:
    return signed(b64(header) + b"." + b64(payload))


def ours(token: bytes, issuer: str | None, audience: str | list[str] | None) -> str:
    try:
        parsed = tokens.parse(token)
        if parsed.alg != "HS256" or not tokens.verify_signature(parsed, SECRET):
            return "refused"
        claims = tokens.decode_claims(parsed)
        tokens.validate_claims(claims, issuer, audience)
        return repr(claims)
    except TokenInvalid:
        return "refused"


def of_pyjwt(token: bytes, issuer: str | None, audience: str | list[str] | None) -> str:
    options: Any = {"require": ["exp"], "verify_aud": audience is not None, "verify_sub": False, "verify_jti": False}
    try:
        claims = jwt.decode(
            token,
            SECRET,
            algorithms=["HS256"],
            issuer=issuer,
            audience=audience,
            leeway=tokens.LEEWAY_SECONDS,
            options=options,
        )
        float(claims["exp"])
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
        return "refused"
    # In addition to PyJWT's checks, an id must be a string or an integer. Without a subject, `id` may name the user.
    ids = [value for name, value in claims.items() if name == "jti" or (name == "sub" and value is not None)]
    if not all(isinstance(each, str | int) and not isinstance(each, bool) for each in ids):
        return "refused"
    return repr(claims)


def assert_alike(token: bytes, issuer: str | None = None, audience: str | list[str] | None = None) -> str:
    verdict = ours(token, issuer, audience)
    assert verdict == of_pyjwt(token, issuer, audience)
    return verdict


def test_a_plain_token_passes() -> None:
    """Shows that the comparisons are not all of refusals."""
    token = made(json.dumps(HEADER).encode(), json.dumps(CLAIMS | {"iss": "i", "aud": ["a", "b"]}).encode())
    assert "ana" in assert_alike(token, "i", ["x", "b"])
    assert assert_alike(token[:-2] + b"AA", "i", "a") == "refused"
    for text in (b"", b".", b"..", b"...", b"a", b"a.b", b"\xff.\xff.\xff", b"a.b.c.d.e"):
        assert assert_alike(text) == "refused"
    # PyJWT refuses a secret that looks like a key in PEM.
    pem = b"-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE\n-----END PUBLIC KEY-----\n"
    assert not tokens.verify_signature(tokens.parse(token), pem)


@pytest.mark.parametrize("alg", ["ES256", "ES384", "ES512", "EdDSA", *RSA])
def test_every_algorithm(alg: str) -> None:
    key, other = private_key(alg), private_key("RS256" if alg.startswith("ES") else "ES256")
    token = tokens.parse(jwt.encode(CLAIMS, key, alg).encode())
    assert token.alg == alg
    for name in EDWARDS if alg == "EdDSA" else (alg,):
        assert tokens.verify_signature(token._replace(alg=name), key.public_key())
    assert not tokens.verify_signature(token._replace(signing_input=token.signing_input + b"x"), key.public_key())
    assert not tokens.verify_signature(token._replace(signature=token.signature[:-1]), key.public_key())
    assert not tokens.verify_signature(token._replace(signature=b""), key.public_key())
    assert not tokens.verify_signature(token, other.public_key()), "a key of another type"


@pytest.mark.parametrize("alg", ["none", "None", "NONE", "", "HS1", "ES256K"])
def test_no_other_algorithm(alg: str) -> None:
    for signature in (b"", b"x"):
        for key in (SECRET, b"", None, ""):
            assert not tokens.verify_signature(tokens.UnverifiedToken(alg, None, b"a.b", b"{}", signature), key)


@given(
    st.one_of(
        st.binary(max_size=40).map(base64.urlsafe_b64encode),
        st.binary(max_size=40).map(b64),
        st.lists(st.sampled_from(list(CHARACTERS)), max_size=12).map(bytes),
    ),
    st.sampled_from(["header", "payload", "signature", "between"]),
)
@example(b64(b'{"exp":9999999999} ')[:-1] + b"B", "payload")  # bits beyond the last byte
@example(b64(b'{"exp":9999999999}') + b"=", "payload")
@example(b"A", "signature")
@example(b"QQ\n", "header")
@example(b"", "header")
def test_segments(segment: bytes, place: str) -> None:
    header, payload = b64(json.dumps(HEADER).encode()), b64(json.dumps(CLAIMS).encode())
    assert_alike(
        {
            "header": signed(segment + b"." + payload),
            "payload": signed(header + b"." + segment),
            "signature": header + b"." + payload + b"." + segment,
            "between": signed(header + b"." + segment + b"." + payload),
        }[place]
    )


OBJECTS = [
    b'{"sub":1,"sub":2,"exp":9999999999}',
    b'{"sub":123456789012345678901234567890,"exp":9999999999}',
    b'{"sub":%b,"exp":9999999999}' % (b"1" * 5_000),
    b'{"exp":1e400}',
    b'{"exp":%b}' % (b"1" * 400),
    b'{"exp":NaN}',
    b'{"exp":9999999999,"x":NaN}',
    b'{"exp":9999999999,"name":"\\ud800"}',
    b'\xef\xbb\xbf{"exp":9999999999}',
    '{"exp":9999999999,"name":"é"}'.encode("utf-16"),
    b'{"exp":9999999999,"name":"\x01"}',
    b'{"exp":9999999999,"name":"\xff"}',
    b'{"exp":9999999999,"a":' + b'{"a":' * 2_000 + b"1" + b"}" * 2_001,
    b'{"a":' * 100_000,
    b"[]",
    b"null",
    b"{} {}",
    b"{",
    b"",
]


@pytest.mark.parametrize("payload", OBJECTS)
def test_payloads(payload: bytes) -> None:
    """And headers."""
    assert_alike(made(json.dumps(HEADER).encode(), payload))
    assert_alike(made(payload.replace(b"{", b'{"alg":"HS256",', 1), json.dumps(CLAIMS).encode()))


def test_headers() -> None:
    for members in (
        *({"alg": alg} for alg in (None, 5, ["HS256"], {}, "", "hs256")),
        *({"kid": kid} for kid in (None, 5, ["k"], "k")),
        *({"b64": b64} for b64 in (False, True, None)),
        *({"crit": crit} for crit in ([], None, "b64", ["b64"])),
        {"typ": 5},
        {"crit": ["b64"], "b64": False},
        {"crit": ["cormorant"], "cormorant": True},
    ):
        assert_alike(made(json.dumps(HEADER | members).encode(), json.dumps(CLAIMS).encode()))
    # PyJWT accepts this one, which has no effect: `b64` is true by default.
    header = json.dumps(HEADER | {"crit": ["b64"], "b64": True}).encode()
    assert ours(made(header, json.dumps(CLAIMS).encode()), None, None) == "refused"
    assert assert_alike(made(b'{"typ":"JWT"}', json.dumps(CLAIMS).encode())) == "refused"


TIMES = st.one_of(
    # Far enough from the limits of the leeway for the seconds that pass between two verifications.
    st.sampled_from([NOW - 3_600, NOW - 1_000, NOW, NOW + 1_000, NOW + 3_600, 0, -1, 10**400]),
    st.sampled_from([None, True, False, "", "soon", str(NOW + 1_000), f" {NOW + 1_000} ", NOW + 1_000.5, 1e300]),
    st.sampled_from([float("inf"), float("nan"), [], [NOW], {}, {"a": 1}, "1_000", "٣", "9" * 5_000]),
)
NAMES = st.sampled_from(["a", "b", "", None, 5, True, ["a"], ["b", "a"], ["a", 5], [], {}, {"a": 1}, [["a"]]])


@given(
    claims=st.fixed_dictionaries(
        {"exp": st.one_of(st.just(NOW + 3_600), TIMES)},
        optional={"iat": TIMES, "nbf": TIMES, "iss": NAMES, "aud": NAMES, "sub": NAMES, "jti": NAMES, "id": NAMES},
    ),
    issuer=st.sampled_from([None, "a", "b"]),
    audience=st.sampled_from([None, "", "a", "b", [], [""], ["a"], ["b", "c"], ["a", "b"]]),
)
@example(claims=CLAIMS | {"aud": ["a", 5]}, issuer=None, audience="a")
@example(claims=CLAIMS | {"aud": ""}, issuer=None, audience="")
@example(claims=CLAIMS | {"aud": [""]}, issuer=None, audience=[""])
def test_claims(claims: dict[str, Any], issuer: str | None, audience: str | list[str] | None) -> None:
    assert_alike(made(json.dumps(HEADER).encode(), json.dumps(claims).encode()), issuer, audience)


@pytest.mark.parametrize(
    "seconds", [-60, -tokens.LEEWAY_SECONDS - 2, -tokens.LEEWAY_SECONDS + 2, 0, tokens.LEEWAY_SECONDS - 2, 60]
)
@pytest.mark.parametrize("claim", ["exp", "nbf", "iat"])
def test_the_leeway(claim: str, seconds: int) -> None:
    claims = CLAIMS | {claim: int(time.time()) + seconds}
    verdict = assert_alike(made(json.dumps(HEADER).encode(), json.dumps(claims).encode()))
    assert (verdict == "refused") == (
        seconds < -tokens.LEEWAY_SECONDS if claim == "exp" else seconds > tokens.LEEWAY_SECONDS
    )
