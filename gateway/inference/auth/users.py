"""Verifies a user's JWT against the backend of the called app.

A verified token is cached for 60 seconds, or for as long as the key set with its key is fresh, but never past its
`exp`. It is cached under a hash of the token and of the app's identity: its account, its creation and its `auth`. A
token of one app therefore never passes at another app, and no token outlives the app it was verified for. When a key
set has changed, its tokens are verified again, so revoking a key invalidates its tokens.

The work that tokens may cause is limited (`verification_budget.py`). Failure policy: closed. If a token cannot be
checked, the request is refused.
"""

import hashlib
import time
from collections import OrderedDict
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog

from gateway.accounts.jose import jwt
from gateway.accounts.jose.jwk import PublicKey
from gateway.accounts.records import App, BackendAuth, JwksAuth, SecretAuth
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.deploys.addresses import live_url
from gateway.errors import AppBackendUnreachable, TokenFault, TokenInvalid
from gateway.inference.auth.backend import AppBackend
from gateway.inference.auth.key_sets import FETCH_INTERVAL_SECONDS, KeySet
from gateway.inference.auth.shared_key_sets import SharedKeys
from gateway.inference.auth.trial_tokens import is_test_token, verify_test_token
from gateway.inference.auth.verification_budget import Verification, VerificationLimits
from gateway.outbound import client as outbound
from gateway.outbound.backoff import FIRST_PAUSE_SECONDS
from gateway.redis.client import Store
from gateway.settings import Settings

logger = structlog.get_logger()

TOKEN_SECONDS = 60.0  # that a verified token stays cached, at least
MAX_TOKENS = 50_000  # in the cache
TOKEN_BYTES = 8_192
USER_BYTES = 512
REFUSALS = (400, 401, 403, 404, 422)  # statuses with which an app's backend refuses a token
MAX_ORIGINS = 10_000  # cached key sets, and cached backends; each app has one of either
MAX_KEYS = 40_000  # of all key sets; about 100 MB
MAX_ACCOUNT_KEYS = 2_000  # of the key sets of an account's apps


class UserLimits(msgspec.Struct, frozen=True):
    """What a process remembers of users and apps' key sets; times are in seconds."""

    token_seconds: float = TOKEN_SECONDS
    origins: int = MAX_ORIGINS
    keys: int = MAX_KEYS
    account_keys: int = MAX_ACCOUNT_KEYS
    fetch_interval: float = FETCH_INTERVAL_SECONDS  # between fetches of a key set


USER_LIMITS = UserLimits()

Origin = TypeVar("Origin", KeySet, AppBackend)


class VerifiedToken(NamedTuple):
    user: str
    expires_at: float  # Unix seconds
    cached_until: float  # monotonic seconds; a fresh key set extends it
    key_set_digest: bytes  # of the key set that verified the token; empty if none did

    def is_valid(self, key_set: KeySet | None) -> bool:
        """Returns whether the token may still be used. `key_set` is the app's current one."""
        cached_until = self.cached_until
        if self.key_set_digest:
            if key_set is None or key_set.digest != self.key_set_digest:
                return False
            cached_until = max(cached_until, key_set.fresh_until)
        return time.monotonic() < cached_until and time.time() < self.expires_at


class TokenCheck(msgspec.Struct, frozen=True):
    """What the owner of an app learns about a token."""

    valid: bool
    reason: TokenFault | None  # null if it is valid
    user: str | None  # null if it is not valid
    claims: dict[str, Any] | None  # unverified if the token is not valid; null if it cannot be read


class Users:
    def __init__(
        self,
        settings: Settings,
        vault: Vault,
        http: outbound.Client,
        store: Store | None = None,
        apps_http: outbound.Client | None = None,
        *,
        limits: UserLimits = USER_LIMITS,
    ) -> None:
        """`store`: for sharing key sets with other processes; None shares none.

        `apps_http` calls the hosted apps, at addresses that need not be public.
        """
        self._settings, self._vault, self._http, self._store = settings, vault, http, store
        self._apps_http, self._user_limits = apps_http or http, limits
        self._limits = VerificationLimits(settings.rate_limits.app)
        self._check_limits = VerificationLimits(settings.rate_limits.app)  # checks by owners delay no user
        self._verified: OrderedDict[bytes, VerifiedToken] = OrderedDict()
        # By the id of the app, with the `auth_digest` of the app that they belong to.
        self._key_sets: OrderedDict[str, tuple[bytes, KeySet]] = OrderedDict()
        self._backends: OrderedDict[str, tuple[bytes, AppBackend]] = OrderedDict()

    async def verify(self, app: App, token: bytes) -> str:
        """Returns the user's id. Raises TokenInvalid, AppBackendUnreachable or TokensLimited."""
        if len(token) > TOKEN_BYTES:
            raise TokenInvalid
        if is_test_token(token):
            return str(verify_test_token(self._vault, app, token)["sub"])
        digest = hashlib.sha256(app.auth_digest + token).digest()
        if (verified := self._verified.get(digest)) is not None:
            if verified.is_valid(_recall(self._key_sets, app)):
                return verified.user
            del self._verified[digest]
        verified = await self._verify(app, token, self._limits)
        while len(self._verified) >= MAX_TOKENS:
            self._verified.popitem(last=False)
        self._verified[digest] = verified
        return verified.user

    async def check(self, app: App, token: bytes) -> TokenCheck:
        """Verifies a token for the app's owner, and keeps nothing of it. Raises TokensLimited."""
        user: str | None = None
        reason: TokenFault | None = None
        try:
            if len(token) > TOKEN_BYTES:
                raise TokenInvalid
            if is_test_token(token):
                user = str(verify_test_token(self._vault, app, token)["sub"])
            else:
                user = (await self._verify(app, token, self._check_limits)).user
        except (TokenInvalid, AppBackendUnreachable) as error:
            reason = error.reason
        return TokenCheck(reason is None, reason, user, _readable_claims(token))

    async def _verify(self, app: App, token: bytes, limits: VerificationLimits) -> VerifiedToken:
        verification = await limits.begin(app)
        valid = False
        key_set_digest = b""
        try:
            match app.auth:
                case JwksAuth() as auth:
                    claims, key_set_digest = await self._verify_with_key_set(app, auth, token, verification)
                    user = _user_of(claims, auth.userClaim)
                case SecretAuth() as auth:
                    claims = self._verify_with_secret(auth, token)
                    user = _user_of(claims, auth.userClaim)
                case BackendAuth() as auth:
                    claims, user = await self._verify_with_backend(app, auth, token, verification)
            valid = True
        except NoEncryptionKey as error:
            logger.error("auth.sealed", app=app.id, error=str(error))
            raise AppBackendUnreachable(reason="keys-unreadable") from None
        finally:
            verification.finish(valid=valid)
        return VerifiedToken(
            user, jwt.expires_at(claims), time.monotonic() + self._user_limits.token_seconds, key_set_digest
        )

    async def _verify_with_key_set(
        self, app: App, auth: JwksAuth, token: bytes, verification: Verification
    ) -> tuple[dict[str, Any], bytes]:
        """Returns the claims, and the digest of the key set that verified the token."""
        parsed = jwt.parse(token)
        key_set = _recall(self._key_sets, app)
        if key_set is None:
            http, url = self.resolve_url(app, auth)
            shared, interval = self._shared_keys(app, url), self._user_limits.fetch_interval
            key_set = KeySet(http, url, app.account, shared, fetch_interval=interval)
            self._remember(self._key_sets, app, key_set)
        began = time.monotonic()
        keys, digest = key_set.find(parsed.kid, parsed.alg), key_set.digest
        if keys is None:
            verification.pause()
            keys = await key_set.fetch(parsed.kid, parsed.alg)
            self._forget_keys(key_set.account)
            digest = key_set.digest
            await verification.acquire()
        if not keys:
            raise TokenInvalid(reason=key_set.explain_missing(parsed.kid, parsed.alg))
        if not await _is_signed(parsed, keys, verification):
            verification.pause()
            keys = await key_set.fetch_newer(parsed.kid, parsed.alg, digest, began)
            if not keys:
                raise TokenInvalid(reason="signature")
            self._forget_keys(key_set.account)
            digest = key_set.digest
            await verification.acquire()
            if not await _is_signed(parsed, keys, verification):
                raise TokenInvalid(reason="signature")
        return _claims_of(parsed, auth), digest

    def resolve_url(self, app: App, auth: JwksAuth | BackendAuth) -> tuple[outbound.Client, str]:
        """Returns the address to call, and the client for it.

        Only the operator's settings and the app's name decide about the host of an app's own address.
        """
        if auth.url.startswith("/"):
            return self._apps_http, live_url(app.name, self._settings) + auth.url
        return self._http, auth.url or f"https://{app.name}.{self._settings.apps_domain}/.well-known/jwks.json"

    def _shared_keys(self, app: App, url: str) -> SharedKeys | None:
        if self._store is None:
            return None
        identity = hashlib.sha256(app.auth_digest + url.encode()).hexdigest()
        return SharedKeys(self._store, app.account, app.id, identity)

    def _remember(self, origins: OrderedDict[str, tuple[bytes, Origin]], app: App, origin: Origin) -> None:
        """Stores the app's origin in place of an outdated one."""
        origins.pop(app.id, None)
        while len(origins) >= self._user_limits.origins:
            origins.popitem(last=False)
        origins[app.id] = app.auth_digest, origin

    def _forget_keys(self, account: str) -> None:
        """Forgets the oldest key sets, of the account and then of all, until their keys are within the limits."""
        sizes = {app: key_set.size for app, (_, key_set) in self._key_sets.items()}
        own = [app for app, (_, key_set) in self._key_sets.items() if key_set.account == account]
        for apps, most in ((own, self._user_limits.account_keys), (list(sizes), self._user_limits.keys)):
            surplus = sum(sizes.get(app, 0) for app in apps) - most
            for app in apps:
                if surplus <= 0:
                    break
                surplus -= sizes.pop(app, 0)
                self._key_sets.pop(app, None)

    def _verify_with_secret(self, auth: SecretAuth, token: bytes) -> dict[str, Any]:
        secret = self._vault.open(auth.secret)
        parsed = jwt.parse(token)
        if parsed.alg not in jwt.HMAC:
            raise TokenInvalid(reason="algorithm")
        if not jwt.verify_signature(parsed, secret):
            raise TokenInvalid(reason="signature")
        return _claims_of(parsed, auth)

    async def _verify_with_backend(
        self, app: App, auth: BackendAuth, token: bytes, verification: Verification
    ) -> tuple[dict[str, Any], str]:
        # The backend checks the signature. Tokens that have expired, or never expire, are refused without a call.
        claims = jwt.decode_claims(jwt.parse(token))
        if time.time() >= jwt.expires_at(claims):
            raise TokenInvalid(reason="expired")
        backend = _recall(self._backends, app)
        if backend is None:
            http, url = self.resolve_url(app, auth)
            backend = AppBackend(http, msgspec.structs.replace(auth, url=url), app.account)
            self._remember(self._backends, app, backend)
        verification.pause()
        answer = await backend.send_token(token.decode("ascii"), verification)
        if answer.status in REFUSALS:
            raise TokenInvalid(reason="backend-status")
        if not 200 <= answer.status < 300:
            raise AppBackendUnreachable(retry_after=FIRST_PAUSE_SECONDS, reason="backend-status")
        if (user := find_user(answer.body, auth)) is not None:
            return claims, user
        if auth.userField:
            raise TokenInvalid(reason="user")
        return claims, _user_of(claims, None)


def find_user(body: bytes, auth: BackendAuth) -> str | None:
    """Returns the user's id in the answer of an app's backend, or None if there is none."""
    try:
        answer = msgspec.json.decode(body or b"null")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    paths = [auth.userField] if auth.userField else ["id", "sub", "record.id", "user.id"]
    return next((user for path in paths if (user := _user_at(answer, path)) is not None), None)


def _readable_claims(token: bytes) -> dict[str, Any] | None:
    """Returns the unverified claims of a token, or None if they cannot be read, or written as JSON."""
    try:
        claims = jwt.decode_claims(jwt.parse(token))
        return msgspec.json.decode(msgspec.json.encode(claims), type=dict[str, Any])
    except (TokenInvalid, msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return None


def _claims_of(parsed: jwt.UnverifiedToken, auth: JwksAuth | SecretAuth) -> dict[str, Any]:
    """Returns the claims of a token with a valid signature. Raises TokenInvalid."""
    claims = jwt.decode_claims(parsed)
    jwt.validate_claims(claims, auth.issuer, auth.audience)
    return claims


def _recall(origins: OrderedDict[str, tuple[bytes, Origin]], app: App) -> Origin | None:
    digest, origin = origins.get(app.id, (b"", None))
    return origin if digest == app.auth_digest else None


async def _is_signed(token: jwt.UnverifiedToken, keys: list[PublicKey], verification: Verification) -> bool:
    """Returns whether one of the keys signed the token."""
    for number, key in enumerate(keys):
        if number:
            await verification.acquire_next()
        if jwt.verify_signature(token, key.key):
            return True
    return False


def _user_of(claims: dict[str, Any], claim: str | None) -> str:
    for name in [claim] if claim else ["sub", "id"]:
        if (user := _user_at(claims, name)) is not None:
            return user
    raise TokenInvalid(reason="user")


def _user_at(value: Any, path: str) -> str | None:
    """Returns the user id, a string or an integer, or None if there is none.

    `path` is the name of a field, which may contain dots, or a dotted path.
    """
    for name in [path] if isinstance(value, dict) and path in value else path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if not jwt.is_id(value):
        return None
    try:
        user = str(value)
        return user if 0 < len(user.encode()) <= USER_BYTES else None
    except ValueError:  # half a surrogate pair cannot be encoded, and a number of thousands of digits is refused
        return None
