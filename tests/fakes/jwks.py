"""Keys as apps' backends and OpenID providers publish them: one table of those that are read and those left out."""

import base64
import secrets
from types import EllipsisType
from typing import Any, NamedTuple

from tests.fakes.backend import jwk, private_key

EC, RSA, ED = (jwk(alg, private_key(alg), "good") for alg in ("ES256", "RS256", "EdDSA"))


def number(bits: int, last: int = 1) -> str:
    value = secrets.randbits(bits) | 1 << (bits - 1) | 1
    return base64.urlsafe_b64encode((value - 1 + last).to_bytes((bits + 7) // 8, "big")).rstrip(b"=").decode()


# The algorithm of a key, and its members that are not as in RFC 7517's examples. `...` leaves out a member.
READ: dict[str, tuple[str, dict[str, Any | EllipsisType]]] = {
    "as Cognito publishes it": ("RS256", {}),
    "as Entra ID publishes it": (
        "RS256",
        {"alg": ..., "x5t": "lz8Tx2FqPUW4Vn1o", "x5c": ["MIIC/jCCAeagAwIBAgIJ"], "issuer": "https://id.example/v2.0"},
    ),
    "as Keycloak publishes it": ("PS512", {"x5c": ["MIICmzCCAYM="], "x5t": "t", "x5t#S256": "s"}),
    "every member of other key types is null": (
        "RS256",
        dict.fromkeys(("crv", "x", "y", "k", "d", "p", "q", "dp", "dq", "qi", "oth", "x5c", "x5u", "key_ops")),
    ),
    "a curve's key with members of other types that are null": ("ES384", dict.fromkeys(("n", "e", "k", "d", "alg"))),
    "an Edwards key with a y that is null": ("EdDSA", {"y": None}),
    "an Edwards key with the newer name": ("Ed25519", {}),
    "x5c and x5u are no certificates": ("ES256", {"x5c": [1], "x5u": {}}),
    "kid is missing": ("ES256", {"kid": ...}),
    "kid is null": ("ES256", {"kid": None}),
    "kid is a number": ("ES256", {"kid": 7}),
    "alg is missing": ("ES512", {"alg": ...}),
    "alg is null": ("ES256", {"alg": None}),
    "use is missing": ("ES256", {"use": ...}),
    "use is null": ("ES256", {"use": None}),
    "use is empty": ("ES256", {"use": ""}),
    "key_ops is null": ("ES256", {"key_ops": None}),
    "key_ops is empty": ("ES256", {"key_ops": []}),
    "key_ops has verify among others": ("ES256", {"key_ops": ["sign", "verify", "of tomorrow"]}),
}

LEFT_OUT: dict[str, Any] = {
    "key_ops are for something else": EC | {"key_ops": ["sign"]},
    "key_ops is a text": EC | {"key_ops": "verify"},
    "use is encryption": EC | {"use": "enc"},
    "use is for something else": EC | {"use": "SIG"},
    "kid is a list": EC | {"kid": ["k"]},
    "kid is true": EC | {"kid": True},
    "kid is a long number": EC | {"kid": 10**201},
    "kid is long": EC | {"kid": "k" * 201},
    "alg is of another curve": EC | {"alg": "ES384"},
    "alg is of another type": RSA | {"alg": "ES256"},
    "alg is of a secret": RSA | {"alg": "HS256"},
    "alg is none": EC | {"alg": "none"},
    "alg is for encryption": RSA | {"alg": "RSA-OAEP", "use": None},
    "alg is of another Edwards curve": ED | {"alg": "Ed448"},
    "crv is missing": {k: v for k, v in EC.items() if k != "crv"},
    "crv is a list": EC | {"crv": ["P-256"]},
    "crv is that of Bitcoin": EC | {"crv": "secp256k1", "alg": "ES256K"},
    "crv is for agreement": ED | {"crv": "X25519", "alg": None},
    "x is null": EC | {"x": None},
    "x is no base64": EC | {"x": "ü" * 43},
    "x is long": EC | {"x": "A" * 100_000},
    "not on the curve": EC | {"y": EC["x"]},
    "n is missing": {k: v for k, v in RSA.items() if k != "n"},
    "n is small": RSA | {"n": number(1024)},
    "n is large": RSA | {"n": number(8193)},
    "n is huge": RSA | {"n": number(200_000)},
    "n is even": RSA | {"n": number(2048, last=0)},
    "e is one": RSA | {"e": "AQ"},
    "e is even": RSA | {"e": "AQAC"},
    "e is large": RSA | {"e": number(33)},
    "kty is missing": {k: v for k, v in RSA.items() if k != "kty"},
    "kty is unknown": {"kty": "AKP", "alg": "ML-DSA-44", "pub": "AAAA", "kid": "k"},
    "a symmetric key": {"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"},
    "null": None,
}


class PublishedKey(NamedTuple):
    alg: str
    private: Any
    kid: str | None  # in the header of a token
    document: dict[str, list[Any]]  # whose last key it is, after all that are left out and another one of its `kid`


def publish(name: str) -> PublishedKey:
    """Returns a new key, published as the table says."""
    alg, changes = READ[name]
    key, other, kid = private_key(alg), private_key(alg), secrets.token_hex(8)
    members = {k: v for k, v in {**jwk(alg, key, kid), **changes}.items() if v is not ...}
    kid = members.get("kid")
    kid = None if kid is None else str(kid)
    return PublishedKey(alg, key, kid, {"keys": [*LEFT_OUT.values(), jwk(alg, other, kid or "other"), members]})
