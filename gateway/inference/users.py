"""Verifies a user's JWT against the backend of the app that was called.

A verified token is cached for 60 seconds, never past its `exp`, under a hash of the token and of the app's identity:
its account, its creation and how its tokens are verified. A token of one app therefore never passes at another, and
none outlives the app it was verified for.

How much work tokens may cause is limited (`verification_limits`). Failure policy: closed. If a token cannot be checked,
the request is refused.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import re
import time
from collections import OrderedDict
from typing import Any, NamedTuple, TypeVar

import jwt
import msgspec
import structlog
from jwt.algorithms import OKPAlgorithm
from jwt.api_jws import PyJWS

from gateway.accounts.records import App, BackendAuth, JwksAuth, SecretAuth
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.errors import AppBackendUnreachable, TokenInvalid
from gateway.inference.app_backends import AppBackend
from gateway.inference.key_sets import EDWARDS, KeySet
from gateway.inference.verification_limits import VerificationLimits, Work
from gateway.outbound import client as outbound
from gateway.outbound.backoff import FIRST_PAUSE
from gateway.settings import Settings

logger = structlog.get_logger()

LEEWAY = 10  # seconds that clocks may differ
TOKEN_LIFE = 60.0  # seconds that a verified token stays cached
TOKENS = 50_000  # in the cache
TOKEN_BYTES = 8_192
USER_BYTES = 512
ORIGINS = 10_000  # key sets and backends that are remembered, of each

HMAC = ("HS256", "HS384", "HS512")

Origin = TypeVar("Origin", KeySet, AppBackend)


class QuickJWS(PyJWS):
    """PyJWT looks at each character of a token by itself, which takes a third of the time that a signature does."""

    @staticmethod
    def _decode_base64url_segment(segment: bytes, name: str) -> bytes:
        if _SEGMENT.fullmatch(segment) and len(segment) % 4 != 1:
            standard = segment.translate(_STANDARD) + b"=" * (-len(segment) % 4)
            decoded = binascii.a2b_base64(standard)
            if binascii.b2a_base64(decoded, newline=False) == standard:
                return decoded
        return PyJWS._decode_base64url_segment(segment, name)  # refuses it, or takes its padding


class QuickJWT(jwt.PyJWT):
    """PyJWT with a faster base64 and JSON. What these refuse, PyJWT judges."""

    def __init__(self) -> None:
        super().__init__()
        self._jws = QuickJWS()
        for name in EDWARDS:
            with contextlib.suppress(ValueError):  # PyJWT knows it by now
                self._jws.register_algorithm(name, OKPAlgorithm())

    def _decode_payload(self, decoded: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            return msgspec.json.decode(decoded["payload"], type=dict[str, Any])
        return super()._decode_payload(decoded)  # refuses it, or takes what is not quite JSON


_SEGMENT = re.compile(rb"[A-Za-z0-9_-]*")
_STANDARD = bytes.maketrans(b"-_", b"+/")  # to base64 from base64url
_jwt = QuickJWT()


class Header(msgspec.Struct):
    """The members that choose the key. PyJWT judges the whole header when it checks the signature."""

    alg: str
    kid: str | None = None


def read_header(token: bytes) -> Header:
    """Raises TokenInvalid."""
    segment = token.partition(b".")[0]
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(segment + b"=" * (-len(segment) % 4)), type=Header)
    except (ValueError, RecursionError):
        raise TokenInvalid from None


class VerifiedToken(NamedTuple):
    user: str
    cached_until: float  # monotonic seconds
    expires_at: float  # Unix seconds


class Users:
    def __init__(self, settings: Settings, vault: Vault, http: outbound.Client) -> None:
        self._domain, self._vault, self._http = settings.apps_domain, vault, http
        self._limits = VerificationLimits(settings.rate_limits.app)
        self._verified: OrderedDict[bytes, VerifiedToken] = OrderedDict()
        self._key_sets: OrderedDict[bytes, KeySet] = OrderedDict()
        self._backends: OrderedDict[bytes, AppBackend] = OrderedDict()

    async def verify(self, app: App, token: bytes) -> str:
        """The user's id. Raises TokenInvalid, AppBackendUnreachable or AppRateLimited."""
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
        work = await self._limits.begin(app)
        valid = False
        try:
            match app.auth:
                case JwksAuth() as auth:
                    claims = await self._verify_with_key_set(app, auth, token, work)
                    user = _user_of(claims, auth.userClaim)
                case SecretAuth() as auth:
                    claims = self._decode(token, self._vault.open(auth.secret), HMAC, auth)
                    user = _user_of(claims, auth.userClaim)
                case BackendAuth() as auth:
                    claims, user = await self._verify_with_backend(app, auth, token, work)
            valid = True
        except NoEncryptionKey as error:
            logger.error("auth.sealed", app=app.id, error=str(error))
            raise AppBackendUnreachable from None
        finally:
            work.finish(valid=valid)
        return user, float(claims["exp"]) + LEEWAY

    async def _verify_with_key_set(self, app: App, auth: JwksAuth, token: bytes, work: Work) -> dict[str, Any]:
        header = read_header(token)
        key_set = self._key_sets.get(app.auth_digest)
        if key_set is None:
            url = auth.url or f"https://{app.name}.{self._domain}/.well-known/jwks.json"
            key_set = _remember(self._key_sets, app, KeySet(self._http, url, app.account))
        keys = key_set.find(header.kid, header.alg)
        if keys is None:
            work.pause()
            keys = await key_set.fetch(header.kid, header.alg)
            await work.take_turn()
        for number, key in enumerate(keys):
            if number:
                await work.take_another_turn()
            try:
                return self._decode(token, key.key, (header.alg,), auth)
            except TokenInvalid:
                continue
        raise TokenInvalid

    def _decode(self, token: bytes, key: Any, allowed: tuple[str, ...], auth: JwksAuth | SecretAuth) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = _jwt.decode(
                token,
                key,
                algorithms=list(allowed),
                audience=auth.audience,
                issuer=auth.issuer,
                leeway=LEEWAY,
                options={
                    "require": ["exp"],
                    "verify_aud": auth.audience is not None,
                    "verify_sub": False,  # PyJWT takes texts only
                    "verify_jti": False,
                },
            )
            if not all(_is_id(claims[name]) for name in ("sub", "jti") if name in claims):
                raise TokenInvalid
            float(claims["exp"])
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise TokenInvalid from None
        return claims

    async def _verify_with_backend(
        self, app: App, auth: BackendAuth, token: bytes, work: Work
    ) -> tuple[dict[str, Any], str]:
        # The backend checks the signature. Tokens that have expired, or never expire, are refused without asking it.
        try:
            text = token.decode("ascii")
            claims: dict[str, Any] = jwt.decode(text, options={"verify_signature": False})
            if time.time() > float(claims["exp"]) + LEEWAY:
                raise TokenInvalid
        except (jwt.PyJWTError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise TokenInvalid from None
        backend = self._backends.get(app.auth_digest)
        if backend is None:
            backend = _remember(self._backends, app, AppBackend(self._http, auth, app.account))
        work.pause()
        answer = await backend.ask(text, work)
        if answer.status in (400, 401, 403, 404, 422):
            raise TokenInvalid
        if not 200 <= answer.status < 300:
            raise AppBackendUnreachable(retry_after=FIRST_PAUSE)
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


def _remember(origins: OrderedDict[bytes, Origin], app: App, origin: Origin) -> Origin:
    while len(origins) >= ORIGINS:
        origins.popitem(last=False)
    origins[app.auth_digest] = origin
    return origin


def _is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _user_of(claims: dict[str, Any], claim: str | None) -> str:
    for name in [claim] if claim else ["sub", "id"]:
        if (user := _user_at(claims, name)) is not None:
            return user
    raise TokenInvalid


def _user_at(value: Any, path: str) -> str | None:
    """The user id at a dotted path, if there is one: a string or an integer."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if not _is_id(value):
        return None
    try:
        user = str(value)
        return user if 0 < len(user.encode()) <= USER_BYTES else None
    except ValueError:  # half a surrogate pair cannot be encoded, and Python writes no number of thousands of digits
        return None
