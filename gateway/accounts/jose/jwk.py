"""Reads key sets: the public keys (JWKs) that verify the tokens of apps' users, and those of sign-ins.

Only the public members of a key are read, so other contents of a document cost nothing. Sizes are limited, because the
time to check a signature grows with them. A key with any fault is left out; the others stay usable.
"""

import asyncio
import base64
import codecs
from collections.abc import Callable
from typing import Any, TypeVar

import jwt
import msgspec
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

MAX_KEYS = 100  # per key set; each takes about 2.5 KB of memory
KID_CHARACTERS = 200
SLICE = 10  # keys that are read before other work of the event loop runs
MAX_TRIED = 4  # keys per token
RSA_BITS = range(2_048, 8_193)
RSA_CHARACTERS = 1_400  # of a modulus; 8,192 bits take 1,366 in base64
EXPONENT_CHARACTERS = 8
COORDINATE_CHARACTERS = 92  # 66 bytes, of P-521, take 88
LARGEST_EXPONENT = 2**32

RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
CURVES = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}
MEMBERS = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}  # that make up a public key
EDWARDS = ("Ed25519", "Ed448")  # curves, and also the names of their algorithms in RFC 9864; before, both were EdDSA
ALGORITHMS = frozenset((*RSA, *CURVES.values(), *EDWARDS, "EdDSA"))  # of public keys

T = TypeVar("T")


class _Document(msgspec.Struct):
    keys: list[msgspec.Raw]


class _Jwk(msgspec.Struct):
    """The public members of a key. All others are skipped, including private ones. A member that is null is absent."""

    kty: str
    n: str | None = None
    e: str | None = None
    crv: str | None = None
    x: str | None = None
    y: str | None = None
    kid: str | int | None = None
    alg: str | None = None
    use: str | None = None
    key_ops: list[str] | None = None


class Key(msgspec.Struct, frozen=True):
    kid: str | None
    algorithms: tuple[str, ...]  # that the key may verify; they depend on the key's type, never on the token
    key: Any


async def read_document(body: bytes, read: Callable[[msgspec.Raw], T | None]) -> list[T]:
    """Returns what `read` returns for each usable key. Other work may run in between.

    Raises ValueError or RecursionError if the body is not a JWKS document.
    """
    keys: list[T] = []
    texts = split_document(body)
    for start in range(0, len(texts), SLICE):
        keys += filter(None, map(read, texts[start : start + SLICE]))
        await asyncio.sleep(0)
    return keys


def split_document(body: bytes) -> list[msgspec.Raw]:
    """Returns the undecoded keys of a JWKS document. Raises ValueError or RecursionError if it is not one."""
    return msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8), type=_Document).keys[:MAX_KEYS]


def public_part(text: msgspec.Raw) -> bytes:
    """Returns the public members of a key as JSON, or nothing if the key may not verify tokens."""
    try:
        jwk = msgspec.json.decode(text, type=_Jwk)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return b""
    if not _algorithms(jwk):
        return b""
    members = {name: getattr(jwk, name) for name in ("kty", "kid", "alg", *MEMBERS[jwk.kty])}
    return msgspec.json.encode({name: value for name, value in members.items() if value is not None})


def read_key(text: msgspec.Raw) -> Key | None:
    """Parses a key. Returns None if it may not verify tokens, or is faulty."""
    try:
        jwk = msgspec.json.decode(text, type=_Jwk)
        kid = None if jwk.kid is None else str(jwk.kid)  # of a token, it is always a text
        if kid is not None and len(kid) > KID_CHARACTERS:
            return None
        allowed = _algorithms(jwk)
        return Key(kid, allowed, _public_key(jwk)) if allowed else None
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        return None


def find_keys(keys: list[Key], kid: str | None, alg: str) -> list[Key]:
    """Returns at most `MAX_TRIED` keys that may have signed a token with this header.

    Keys with the token's `kid` come first, and those without one if it has none. Otherwise the document's order counts.
    """
    found = [k for k in keys if alg in k.algorithms and (kid is None or k.kid is None or k.kid == kid)]
    if len(found) > 1:
        found.sort(key=lambda k: k.kid != kid)
    return found[:MAX_TRIED]


def _algorithms(jwk: _Jwk) -> tuple[str, ...]:
    match jwk.kty, jwk.crv:
        case "RSA", _:
            allowed: tuple[str, ...] = RSA
        case "EC", curve if curve in CURVES:
            allowed = (CURVES[curve],)
        case "OKP", curve if curve in EDWARDS:
            allowed = (curve, "EdDSA")
        case _:
            allowed = ()
    if (jwk.use and jwk.use != "sig") or (jwk.key_ops and "verify" not in jwk.key_ops):
        return ()
    if jwk.kty == "OKP" and jwk.alg in allowed:
        return allowed  # two names of one algorithm: the key set may use one, and the token the other
    return allowed if jwk.alg is None else tuple(each for each in allowed if each == jwk.alg)


def _public_key(jwk: _Jwk) -> Any:
    """Raises ValueError or PyJWTError."""
    n, e, x, y = (member or "" for member in (jwk.n, jwk.e, jwk.x, jwk.y))
    if jwk.kty == "RSA":
        if len(n) > RSA_CHARACTERS or len(e) > EXPONENT_CHARACTERS:
            raise ValueError("too large")
        modulus, exponent = _number(n), _number(e)
        # OpenSSL is slower with an even modulus.
        if modulus.bit_length() not in RSA_BITS or modulus % 2 == 0 or not 3 <= exponent < LARGEST_EXPONENT:
            raise ValueError("out of bounds")
        return RSAAlgorithm.from_jwk({"kty": "RSA", "n": n, "e": e})
    if max(len(x), len(y)) > COORDINATE_CHARACTERS:
        raise ValueError("too large")
    if jwk.kty == "EC":
        return ECAlgorithm.from_jwk({"kty": "EC", "crv": jwk.crv, "x": x, "y": y})
    return OKPAlgorithm.from_jwk({"kty": "OKP", "crv": jwk.crv, "x": x})


def _number(text: str) -> int:
    return int.from_bytes(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), "big")
