"""Verifies a user's JWT against the backend of the app that was called.

A verified token is cached for 60 seconds, never past its `exp`, under a hash of the token and of the app's `auth`
settings, so that a token of one app never passes at another.

Each app has a cached key set. It is refreshed in the background after five minutes and stays usable for an hour while
the backend is down; after that, the app's requests are refused. Fetches are limited to one at a time per app, and in
rate.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from typing import Any, NamedTuple

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

logger = structlog.get_logger()

LEEWAY = 10  # seconds that clocks may differ
TOKEN_LIFE = 60.0  # seconds that a verified token stays cached
TOKENS = 50_000  # in the cache
TOKEN_BYTES = 8_192
USER_BYTES = 512

REFRESH_AFTER = 300.0  # seconds after which keys are fetched again in the background
KEYS_LIFE = 3_600.0  # seconds that keys stay usable while their backend is down
FETCH_INTERVAL = 10.0  # seconds between fetches while there are usable keys
RETRY = 1.0  # seconds between fetches while there are none
KEY_SETS = 10_000
KEYS = 100  # per key set
FETCH_BUDGET = 5.0  # seconds
FETCH_BYTES = 262_144

HMAC = ("HS256", "HS384", "HS512")
RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
CURVES = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}


def algorithms(jwk: dict[str, Any]) -> tuple[str, ...]:
    """The algorithms that a key may verify. The key's type decides, never the token."""
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
    alg = jwk.get("alg")
    return allowed if alg is None else tuple(a for a in allowed if a == alg)


class Key(msgspec.Struct, frozen=True):
    kid: str | None
    algorithms: tuple[str, ...]
    key: Any


def read_keys(body: bytes) -> list[Key]:
    """The usable keys of a JWKS document. Raises ValueError if it is not one."""
    document = msgspec.json.decode(body)
    jwks = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(jwks, list):
        raise ValueError("not a key set")
    keys = []
    for jwk in jwks[:KEYS]:
        if isinstance(jwk, dict) and (allowed := algorithms(jwk)):
            try:
                kid = jwk.get("kid")
                keys.append(Key(kid if isinstance(kid, str) else None, allowed, jwt.PyJWK(jwk, allowed[0]).key))
            except (jwt.PyJWTError, ValueError, TypeError, KeyError):
                continue  # the other keys stay usable
    return keys


class KeySet:
    """The keys of one app's backend."""

    def __init__(self, http: outbound.Client, url: str) -> None:
        self._http, self._url = http, url
        self._keys: list[Key] = []
        self._fetched_at = float("-inf")
        self._tried_at = float("-inf")
        self._fetch_task: asyncio.Task[None] | None = None

    async def keys(self) -> list[Key]:
        """The cached keys. Waits for a fetch only if there are none. Raises AppBackendUnreachable."""
        age = time.monotonic() - self._fetched_at
        if age > REFRESH_AFTER:
            usable = age <= KEYS_LIFE
            fetch = self._start_fetch(FETCH_INTERVAL if usable else RETRY)
            if not usable:
                if fetch is not None:
                    await asyncio.shield(fetch)
                if time.monotonic() - self._fetched_at > KEYS_LIFE:
                    raise AppBackendUnreachable(retry_after=RETRY)
        return self._keys

    async def find(self, kid: str | None, alg: str) -> list[Key]:
        """The keys that may have signed a token. An unknown `kid` fetches the keys again, at a limited rate."""
        keys = self._match(await self.keys(), kid, alg)
        if not keys and kid is not None and (fetch := self._start_fetch(FETCH_INTERVAL)) is not None:
            await asyncio.shield(fetch)
            keys = self._match(self._keys, kid, alg)
        return keys

    @staticmethod
    def _match(keys: list[Key], kid: str | None, alg: str) -> list[Key]:
        return [k for k in keys if alg in k.algorithms and (kid is None or k.kid is None or k.kid == kid)]

    def _start_fetch(self, interval: float) -> asyncio.Task[None] | None:
        """The fetch under way, or a new one unless the last began less than `interval` seconds ago."""
        if self._fetch_task is None and time.monotonic() - self._tried_at >= interval:
            self._tried_at = time.monotonic()
            self._fetch_task = asyncio.create_task(self._fetch())
        return self._fetch_task

    async def _fetch(self) -> None:
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
            self._fetched_at = time.monotonic()
        except (addresses.CallFailed, ValueError, msgspec.MsgspecError, RecursionError) as error:
            logger.warning("jwks.failed", host=httpx.URL(self._url).host, error=type(error).__name__)
        finally:
            self._fetch_task = None


class VerifiedToken(NamedTuple):
    user: str
    cached_until: float  # monotonic seconds
    expires_at: float  # Unix seconds


class Users:
    def __init__(self, settings: Settings, vault: Vault, http: outbound.Client) -> None:
        self._domain, self._vault, self._http = settings.apps_domain, vault, http
        self._verified: OrderedDict[bytes, VerifiedToken] = OrderedDict()
        self._key_sets: OrderedDict[bytes, KeySet] = OrderedDict()

    async def verify(self, app: App, token: bytes) -> str:
        """The user's id. Raises TokenInvalid or AppBackendUnreachable."""
        if len(token) > TOKEN_BYTES:
            raise TokenInvalid
        digest = hashlib.sha256(app.auth_digest + token).digest()
        if (verified := self._verified.get(digest)) is not None:
            if time.monotonic() < verified.cached_until and time.time() < verified.expires_at:
                return verified.user
            del self._verified[digest]
        user, expires_at = await self._verify_anew(app, token)
        while len(self._verified) >= TOKENS:
            self._verified.popitem(last=False)
        self._verified[digest] = VerifiedToken(user, time.monotonic() + TOKEN_LIFE, expires_at)
        return user

    async def _verify_anew(self, app: App, token: bytes) -> tuple[str, float]:
        """The user's id, and the Unix time at which the token expires."""
        try:
            text = token.decode("ascii")
            header = jwt.get_unverified_header(text)
        except (jwt.PyJWTError, UnicodeDecodeError, ValueError, RecursionError):
            raise TokenInvalid from None
        try:
            match app.auth:
                case JwksAuth() as auth:
                    claims = await self._verify_with_key_set(app, auth, text, header)
                    user = _user_of(claims, auth.userClaim)
                case SecretAuth() as auth:
                    claims = self._decode(text, self._vault.open(auth.secret), HMAC, auth)
                    user = _user_of(claims, auth.userClaim)
                case BackendAuth() as auth:
                    claims, user = await self._verify_with_backend(auth, text)
        except NoEncryptionKey as error:
            logger.error("auth.sealed", app=app.id, error=str(error))
            raise AppBackendUnreachable from None
        return user, float(claims["exp"]) + LEEWAY

    async def _verify_with_key_set(
        self, app: App, auth: JwksAuth, token: str, header: dict[str, Any]
    ) -> dict[str, Any]:
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

    async def _verify_with_backend(self, auth: BackendAuth, token: str) -> tuple[dict[str, Any], str]:
        # The backend checks the signature. Tokens that have expired, or never expire, are refused without asking it.
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
            logger.warning("backend.failed", host=httpx.URL(auth.url).host, error=type(error).__name__)
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
            if (user := _user_at(body, path)) is not None:
                return claims, user
        if auth.userField:
            raise TokenInvalid
        return claims, _user_of(claims, None)


def _user_of(claims: dict[str, Any], claim: str | None) -> str:
    for name in [claim] if claim else ["sub", "id"]:
        if (user := _user_at(claims, name)) is not None:
            return user
    raise TokenInvalid


def _user_at(value: Any, path: str) -> str | None:
    """The user id at a dotted path, if there is one: a string or an integer."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    try:
        return value if isinstance(value, str) and 0 < len(value.encode()) <= USER_BYTES else None
    except UnicodeEncodeError:  # half a surrogate pair cannot be encoded
        return None
