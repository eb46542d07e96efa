"""Whose token is this? The user's JWT, verified against the backend of the app that was called.

A verified token is remembered under its hash together with the app's way to verify, for 60 s and never past its
`exp`. Key sets are kept for each app: used while fresh, refreshed behind the requests once they age, usable for an
hour when the backend is down, then the app fails closed. One fetch at a time an app, and a bounded rate of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from typing import Any

import httpx
import jwt
import msgspec
import structlog

from gateway.accounts.records import App, BackendAuth, JwksAuth, SecretAuth
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.errors import AppBackendUnreachable, TokenInvalid
from gateway.outbound import addresses
from gateway.outbound import client as outbound
from gateway.settings import Settings

log = structlog.get_logger()

LEEWAY = 10  # seconds
REMEMBER = 60.0  # seconds a verified token is believed without looking again
TOKENS = 50_000  # remembered at the most
TOKEN_BYTES = 8_192
USER_BYTES = 512

FRESH = 300.0  # seconds before keys are fetched again, behind a request
STALE = 3_600.0  # seconds that keys are used while their backend is down
UNKNOWN_KID = 10.0  # seconds between fetches because of an unknown kid
RETRY = 1.0  # seconds between fetches while none has succeeded
KEY_SETS = 10_000
KEYS = 100  # of one set
FETCH_BUDGET = 5.0  # seconds
FETCH_BYTES = 262_144

HMAC = ("HS256", "HS384", "HS512")
RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
CURVES = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}


def algorithms(jwk: dict[str, Any]) -> tuple[str, ...]:
    """What a key may verify: its type decides, never the token."""
    match jwk.get("kty"):
        case "RSA":
            allowed: tuple[str, ...] = RSA
        case "EC":
            allowed = (CURVES[jwk["crv"]],) if jwk.get("crv") in CURVES else ()
        case "OKP":
            allowed = ("EdDSA",) if jwk.get("crv") in ("Ed25519", "Ed448") else ()
        case _:
            allowed = ()
    if jwk.get("use", "sig") != "sig" or "verify" not in jwk.get("key_ops", ["verify"]):
        return ()
    named = jwk.get("alg")
    return allowed if named is None else tuple(a for a in allowed if a == named)


class Key(msgspec.Struct, frozen=True):
    kid: str | None
    algorithms: tuple[str, ...]
    key: Any


def read_keys(body: bytes) -> list[Key]:
    """The usable keys of a JWKS document. Raises ValueError when it is none."""
    document = msgspec.json.decode(body)
    found = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(found, list):
        raise ValueError("not a key set")
    keys = []
    for jwk in found[:KEYS]:
        if isinstance(jwk, dict) and (allowed := algorithms(jwk)):
            try:
                kid = jwk.get("kid")
                keys.append(Key(kid if isinstance(kid, str) else None, allowed, jwt.PyJWK(jwk, allowed[0]).key))
            except (jwt.PyJWTError, ValueError, TypeError, KeyError):
                continue  # one key that cannot be read does not take the others away
    return keys


class KeySet:
    """The keys of one app's backend."""

    def __init__(self, http: outbound.Client, url: str) -> None:
        self._http, self._url = http, url
        self._keys: list[Key] = []
        self._fetched = float("-inf")
        self._tried = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def keys(self) -> list[Key]:
        age = time.monotonic() - self._fetched
        if age > FRESH:
            fetching = self._fetch(UNKNOWN_KID if age <= STALE else RETRY)
            if age > STALE:
                if fetching is not None:
                    await asyncio.shield(fetching)
                if time.monotonic() - self._fetched > STALE:
                    raise AppBackendUnreachable(retry_after=RETRY)
        return self._keys

    async def find(self, kid: str | None, alg: str) -> list[Key]:
        """The keys a token may have been signed with; an unknown `kid` asks the backend again, at a bounded rate."""
        found = self._match(await self.keys(), kid, alg)
        if not found and kid is not None and (fetching := self._fetch(UNKNOWN_KID)) is not None:
            await asyncio.shield(fetching)
            found = self._match(self._keys, kid, alg)
        return found

    @staticmethod
    def _match(keys: list[Key], kid: str | None, alg: str) -> list[Key]:
        return [k for k in keys if alg in k.algorithms and (kid is None or k.kid is None or k.kid == kid)]

    def _fetch(self, apart: float) -> asyncio.Task[None] | None:
        if self._fetching is None and time.monotonic() - self._tried >= apart:
            self._tried = time.monotonic()
            self._fetching = asyncio.create_task(self._fetch_once())
        return self._fetching

    async def _fetch_once(self) -> None:
        try:
            answer = await self._http.fetch(
                "GET",
                self._url,
                headers={"accept": "application/json"},
                budget=FETCH_BUDGET,
                max_bytes=FETCH_BYTES,
            )
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            self._keys = read_keys(answer.body)
            self._fetched = time.monotonic()
        except (addresses.CallFailed, ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("jwks.failed", host=httpx.URL(self._url).host, error=type(error).__name__)
        finally:
            self._fetching = None


class Users:
    def __init__(self, settings: Settings, vault: Vault, http: outbound.Client) -> None:
        self._domain, self._vault, self._http = settings.apps_domain, vault, http
        self._remembered: OrderedDict[bytes, tuple[str, float, float]] = OrderedDict()
        self._key_sets: OrderedDict[bytes, KeySet] = OrderedDict()

    async def verify(self, app: App, token: bytes) -> str:
        """The user's id. Raises TokenInvalid or AppBackendUnreachable."""
        if len(token) > TOKEN_BYTES:
            raise TokenInvalid
        mark = hashlib.sha256(app.auth_digest + token).digest()
        if (known := self._remembered.get(mark)) is not None:
            user, until, expires = known
            if time.monotonic() < until and time.time() < expires:
                return user
            del self._remembered[mark]
        try:
            text = token.decode("ascii")
            header = jwt.get_unverified_header(text)
        except (jwt.PyJWTError, UnicodeDecodeError, ValueError, RecursionError):
            raise TokenInvalid from None
        try:
            match app.auth:
                case JwksAuth() as auth:
                    claims = await self._by_key_set(app, auth, text, header)
                    user = self._user(claims, auth.userClaim)
                case SecretAuth() as auth:
                    claims = self._decode(text, self._vault.open(auth.secret), HMAC, auth)
                    user = self._user(claims, auth.userClaim)
                case BackendAuth() as auth:
                    claims, user = await self._by_backend(auth, text)
        except NoEncryptionKey as error:
            log.error("auth.sealed", app=app.id, error=str(error))
            raise AppBackendUnreachable from None
        while len(self._remembered) >= TOKENS:
            self._remembered.popitem(last=False)
        self._remembered[mark] = (user, time.monotonic() + REMEMBER, float(claims["exp"]) + LEEWAY)
        return user

    async def _by_key_set(self, app: App, auth: JwksAuth, token: str, header: dict[str, Any]) -> dict[str, Any]:
        alg, kid = header.get("alg"), header.get("kid")
        if not isinstance(alg, str) or not isinstance(kid, str | None):
            raise TokenInvalid
        key_set = self._key_sets.get(app.auth_digest)
        if key_set is None:
            while len(self._key_sets) >= KEY_SETS:
                self._key_sets.popitem(last=False)
            url = auth.url or f"https://{app.name}.{self._domain}/.well-known/jwks.json"
            key_set = self._key_sets[app.auth_digest] = KeySet(self._http, url)
        for key in await key_set.find(kid, alg):
            try:
                return self._decode(token, key.key, (alg,), auth)
            except TokenInvalid:
                continue
        raise TokenInvalid

    def _decode(self, token: str, key: Any, allowed: tuple[str, ...], auth: JwksAuth | SecretAuth) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(allowed),
                audience=auth.audience,
                issuer=auth.issuer,
                leeway=LEEWAY,
                options={"require": ["exp"], "verify_aud": auth.audience is not None},
            )
            float(claims["exp"])
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise TokenInvalid from None
        return claims

    async def _by_backend(self, auth: BackendAuth, token: str) -> tuple[dict[str, Any], str]:
        # The backend judges the signature; a token that has expired, or cannot, is not worth asking about.
        try:
            claims: dict[str, Any] = jwt.decode(token, options={"verify_signature": False})
            if time.time() > float(claims["exp"]) + LEEWAY:
                raise TokenInvalid
        except (jwt.PyJWTError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise TokenInvalid from None
        try:
            answer = await self._http.fetch(
                auth.method,
                auth.url,
                headers={"authorization": f"Bearer {token}", "accept": "application/json"},
                budget=FETCH_BUDGET,
                max_bytes=FETCH_BYTES,
            )
        except addresses.CallFailed as error:
            log.warning("backend.failed", host=httpx.URL(auth.url).host, error=type(error).__name__)
            raise AppBackendUnreachable(retry_after=RETRY) from None
        if answer.status in (400, 401, 403, 404, 422):
            raise TokenInvalid
        if not 200 <= answer.status < 300:
            raise AppBackendUnreachable(retry_after=RETRY)
        try:
            body = msgspec.json.decode(answer.body or b"null")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            body = None
        paths = [auth.userField] if auth.userField else ["id", "sub", "record.id", "user.id"]
        for path in paths:
            if (user := _dig(body, path)) is not None:
                return claims, user
        if auth.userField:
            raise TokenInvalid
        return claims, self._user(claims, None)

    @staticmethod
    def _user(claims: dict[str, Any], claim: str | None) -> str:
        for name in [claim] if claim else ["sub", "id"]:
            if (user := _dig(claims, name)) is not None:
                return user
        raise TokenInvalid


def _dig(value: Any, path: str) -> str | None:
    """A user id at a dotted path: text, or a whole number."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    try:
        return value if isinstance(value, str) and 0 < len(value.encode()) <= USER_BYTES else None
    except UnicodeEncodeError:  # half a surrogate pair is no text
        return None
