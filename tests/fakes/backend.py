"""An app's own backend. It signs its users' tokens, serves its public keys and refreshes tokens like PocketBase."""

import asyncio
import contextlib
import json
import secrets
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from tests.fakes.server import Exchange, FakeServer, Script, answer

FAMILIES = {"RS": RSAAlgorithm, "PS": RSAAlgorithm, "ES": ECAlgorithm, "Ed": OKPAlgorithm}
CURVES = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1}
EDWARDS = ("EdDSA", "Ed25519")
with contextlib.suppress(ValueError):  # another module in this process has registered it
    jwt.register_algorithm("Ed25519", OKPAlgorithm())


def private_key(alg: str) -> Any:
    if alg in CURVES:
        return ec.generate_private_key(CURVES[alg]())
    return ed25519.Ed25519PrivateKey.generate() if alg in EDWARDS else rsa.generate_private_key(65537, 2048)


def public_pem(key: Any) -> bytes:
    public = key.public_key()
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def jwk(alg: str, key: Any, kid: str) -> dict[str, Any]:
    public = json.loads(FAMILIES[alg[:2]].to_jwk(key.public_key()))
    return {**public, "kid": kid, "alg": alg, "use": "sig"}


class FakeAppBackend(FakeServer):
    """`keys` maps an algorithm to (kid, private key). `jwks` replaces the response with a script."""

    def __init__(self, *algs: str) -> None:
        super().__init__()
        self.keys: dict[str, tuple[str, Any]] = {}
        self.jwks: Script | None = None
        self.refresh: Script | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        # RSA keys take a while to make, so they are made on request only.
        for alg in algs or ("ES256",):
            self.rotate(alg)

    def rotate(self, alg: str = "ES256") -> None:
        self.keys[alg] = (f"{alg}-{secrets.token_hex(4)}", private_key(alg))

    @property
    def jwks_url(self) -> str:
        return f"{self.address}/.well-known/jwks.json"

    @property
    def refresh_url(self) -> str:
        return f"{self.address}/api/collections/users/auth-refresh"

    @property
    def fetches(self) -> int:
        return sum("jwks" in e.path for e in self.exchanges)

    @property
    def refreshes(self) -> int:
        return sum("auth-refresh" in e.path for e in self.exchanges)

    def token(
        self,
        sub: str | None = "ana",
        alg: str = "ES256",
        *,
        expires: float | None = 3600,
        key: Any = None,
        headers: dict[str, Any] | None = None,
        **claims: Any,
    ) -> str:
        """Returns a token. `expires` is in seconds from now. None leaves out the claim, and so does `sub=None`."""
        kid, own = self.keys.get(alg, (None, None))
        now = time.time()
        payload = {"iat": int(now), **claims}
        if sub is not None:
            payload["sub"] = sub
        if expires is not None:
            payload["exp"] = int(now + expires)
        named = {"kid": kid, **(headers or {})}
        head = {k: v for k, v in named.items() if v is not None}
        return jwt.encode(payload, key or own, algorithm=alg, headers=head)

    def script(self, exchange: Exchange) -> Script:
        if exchange.path.startswith("/api/collections/users/auth-refresh"):
            return [self.gate, *(self.refresh or self._refreshed(exchange))]
        if "jwks" in exchange.path:
            keys = [jwk(alg, key, kid) for alg, (kid, key) in self.keys.items()]
            return [self.gate, *(self.jwks or answer(200, {"keys": keys}))]
        return answer(404)

    def _refreshed(self, exchange: Exchange) -> Script:
        """Answers as PocketBase does: only to POST, with or without a scheme before the token, and with the record."""
        token = (exchange.header("authorization") or "").removeprefix("Bearer ")
        refused = answer(401, {"status": 401, "message": "The request requires valid record authorization."})
        if exchange.method != "POST":
            return answer(405)
        try:
            alg = jwt.get_unverified_header(token)["alg"]
            claims = jwt.decode(token, self.keys[alg][1].public_key(), algorithms=[alg])
        except (jwt.PyJWTError, KeyError):
            return refused
        return answer(200, {"token": token, "record": {"id": claims["sub"], "email": "someone@example.org"}})
