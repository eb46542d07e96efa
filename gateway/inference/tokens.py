"""Reads and verifies JWTs as PyJWT does, in less time.

PyJWT looks at each character of a token, and merges options for each call, which takes half as long as a signature.
Its algorithms are used here; the tests compare all else with it. A header that names critical extensions is refused.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import re
import time
from typing import Any, NamedTuple

import jwt
import msgspec
from jwt.algorithms import Algorithm, OKPAlgorithm, get_default_algorithms
from jwt.api_jws import PyJWS

from gateway.errors import TokenInvalid
from gateway.inference.key_sets import CURVES, EDWARDS, RSA

LEEWAY = 10  # seconds that clocks may differ

HMAC = ("HS256", "HS384", "HS512")

_known = get_default_algorithms()
_ALGORITHMS: dict[str, Algorithm] = {name: _known[name] for name in (*HMAC, *RSA, *CURVES.values(), "EdDSA")}
_ALGORITHMS |= dict.fromkeys(EDWARDS, OKPAlgorithm())
_FAULTS = (jwt.PyJWTError, KeyError, ValueError, TypeError, OverflowError, RecursionError)
_decoder = msgspec.json.Decoder(dict[str, Any])
_SEGMENT = re.compile(rb"[A-Za-z0-9_-]*")
_STANDARD = bytes.maketrans(b"-_", b"+/")  # to base64 from base64url


class Token(NamedTuple):
    """A token that was read, and not yet verified."""

    alg: str
    kid: str | None
    signing_input: bytes
    payload: bytes
    signature: bytes


def read(token: bytes) -> Token:
    """Raises TokenInvalid."""
    try:
        signing_input, signature = token.rsplit(b".", 1)
        head, payload = map(_decode_base64url, signing_input.split(b".", 1))
        header = _object(head)
        alg, kid = header["alg"], header.get("kid")
        if not isinstance(alg, str) or (not isinstance(kid, str) and "kid" in header):
            raise TokenInvalid
        if "crit" in header or header.get("b64", True) is False:
            raise TokenInvalid
        return Token(alg, kid, signing_input, payload, _decode_base64url(signature))
    except _FAULTS:
        raise TokenInvalid from None


def is_signed(token: Token, key: Any) -> bool:
    """Whether the key, which must be one for the token's `alg`, made the token's signature."""
    try:
        algorithm = _ALGORITHMS[token.alg]
        return algorithm.verify(token.signing_input, algorithm.prepare_key(key), token.signature)
    except _FAULTS:
        return False


def read_claims(token: Token, issuer: str | None, audience: str | list[str] | None) -> dict[str, Any]:
    """The claims of a token that is in force, from that issuer and for that audience. Raises TokenInvalid."""
    try:
        claims = _object(token.payload)
        _check(claims, issuer, audience)
    except _FAULTS:
        raise TokenInvalid from None
    return claims


def _check(claims: dict[str, Any], issuer: str | None, audience: str | list[str] | None) -> None:
    """Raises TokenInvalid, or one of `_FAULTS`."""
    now = time.time()
    if float(int(claims["exp"])) <= now - LEEWAY:  # OverflowError: too large for a time
        raise TokenInvalid
    if any(name in claims and int(claims[name]) > now + LEEWAY for name in ("iat", "nbf")):
        raise TokenInvalid
    if issuer is not None and claims["iss"] != issuer:
        raise TokenInvalid
    if audience is not None and not _is_for(claims["aud"], audience):
        raise TokenInvalid
    if not all(is_id(claims[name]) for name in ("sub", "jti") if name in claims):
        raise TokenInvalid


def _is_for(claimed: Any, audience: str | list[str]) -> bool:
    """Whether one of the audiences is among those of the claim."""
    claimed = [claimed] if isinstance(claimed, str) else claimed
    if not isinstance(claimed, list) or not all(isinstance(each, str) for each in claimed):
        return False
    return any(each in claimed for each in ([audience] if isinstance(audience, str) else audience))


def is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _object(text: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError or RecursionError."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return _decoder.decode(text)
    value = json.loads(text)  # takes what is not quite JSON
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _decode_base64url(segment: bytes) -> bytes:
    """Raises PyJWTError or ValueError."""
    if _SEGMENT.fullmatch(segment):
        standard = segment.translate(_STANDARD) + b"=" * (-len(segment) % 4)
        decoded = binascii.a2b_base64(standard)
        if binascii.b2a_base64(decoded, newline=False) == standard:
            return decoded
    return PyJWS._decode_base64url_segment(segment, "token")  # refuses it, or takes its padding
