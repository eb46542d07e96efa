"""Signs people in with OpenID Connect: the authorization code flow, with PKCE, state and nonce.

The browser keeps a ticket in a cookie while it is at the provider. The ticket is a random secret with the time and the
page to return to, and a signature of the service, so that nobody can make the service call the provider with tickets of
their own. State, nonce and PKCE verifier are derived from it, so the service stores nothing until the browser comes
back, and only the browser that began a sign-in can complete it. A ticket can be used once.

`gateway/accounts/jose` verifies the ID token with the provider's key set, as it verifies the tokens of apps' users.
Only signatures of public keys count, never `none` or an HMAC. In all answers of the provider, a member that is null is
absent.

Failure policy: whatever is missing or wrong in what the provider or the browser sends ends the sign-in. The log has the
reason, as `openid.refused`, without addresses, tokens or codes.
"""

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import quote, urlencode

import msgspec
import structlog

from gateway.accounts.api_keys import digest
from gateway.accounts.jose import jwt
from gateway.accounts.jose.jwk import Key, find_keys, read_document, read_key
from gateway.errors import AddressNotVerified, SignInFailed, SignInUnavailable, TokenInvalid
from gateway.keys import sign_in_key
from gateway.outbound.addresses import CallFailed
from gateway.outbound.client import Client
from gateway.redis.client import Store
from gateway.settings import Settings
from gateway.validation import is_email

logger = structlog.get_logger()

SIGN_IN_SECONDS = 600  # that somebody may spend at the provider
METADATA_SECONDS = 300.0  # that the provider's metadata and keys are used
FAILURE_SECONDS = 1.0  # for which a failure to read them counts for others
CALL_SECONDS = 5.0  # that a call of the provider may take
CALL_BYTES = 262_144
TENANT = "openid"  # of outgoing calls
PAGES = ("dashboard", "ops")  # to which a sign-in returns
_TICKET = re.compile(r"((\d{1,12})\.(dashboard|ops)\.[\w-]{43})\.([\w-]{43})", re.ASCII)


class _Metadata(msgspec.Struct, frozen=True):
    """What the provider announces."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None = None
    token_endpoint_auth_methods_supported: tuple[str, ...] | None = None  # then it is client_secret_basic
    authorization_response_iss_parameter_supported: bool | None = None


class _Provider(msgspec.Struct, frozen=True):
    metadata: _Metadata
    keys: list[Key]
    read_at: float  # monotonic seconds


class _Tokens(msgspec.Struct, frozen=True):
    id_token: str
    access_token: str | None = None


class _IdToken(msgspec.Struct, frozen=True):
    """What OpenID Connect requires of an ID token, beside `jwt.validate_claims`."""

    sub: Annotated[str, msgspec.Meta(min_length=1)]
    aud: str | list[str]
    nonce: str
    exp: float
    iat: float
    nbf: float | None = None
    jti: str | None = None
    azp: str | None = None


class Identity(msgspec.Struct, frozen=True):
    """Who has signed in at the provider."""

    email: str  # verified, in lower case
    claims: dict[str, Any]  # of the ID token, and of userinfo if that was read; `email` is the verified address
    page: str  # one of PAGES


class OpenId:
    def __init__(self, settings: Settings, store: Store, http: Client) -> None:
        self._settings, self._store, self._http = settings, store, http
        self._redirect_uri = f"{settings.base_url}/dashboard/callback"
        # Claims that make operators may be at userinfo only.
        self._wanted = {entry.partition("=")[0] for entry in settings.oidc_operators if "=" in entry}
        self._provider: _Provider | None = None
        self._reading = asyncio.Lock()
        self._failed_at = float("-inf")

    @property
    def enabled(self) -> bool:
        return bool(self._settings.oidc_issuer)

    # -- the flow --------------------------------------------------------------------------------------------

    async def begin(self, page: str) -> tuple[str, str]:
        """Returns the ticket, and the provider's address to which the browser goes. Raises SignInUnavailable."""
        metadata = (await self._read_provider()).metadata
        unsigned = f"{int(time.time())}.{page}.{secrets.token_urlsafe(32)}"
        ticket = f"{unsigned}.{self._sign(unsigned)}"
        challenge = hashlib.sha256(_derive(ticket, "verifier").encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self._settings.oidc_client_id,
            "redirect_uri": self._redirect_uri,
            "scope": "openid email profile",
            "state": _derive(ticket, "state"),
            "nonce": _derive(ticket, "nonce"),
            "code_challenge": _encode(challenge),
            "code_challenge_method": "S256",
        }
        separator = "&" if "?" in metadata.authorization_endpoint else "?"
        return ticket, f"{metadata.authorization_endpoint}{separator}{urlencode(query, quote_via=quote)}"

    async def complete(self, ticket: str, answer: Mapping[str, str]) -> Identity:
        """Returns who the browser comes back as. `answer` has the parameters that it brings from the provider.

        Raises SignInFailed, AddressNotVerified and SignInUnavailable.
        """
        page = self.check_return(ticket, answer)
        provider = await self._read_provider()
        announced = provider.metadata.authorization_response_iss_parameter_supported
        if ("iss" in answer or announced) and answer.get("iss") != self._settings.oidc_issuer:
            _refuse("iss")
        if answer.get("error") == "access_denied":
            _refuse("denied", "The identity provider did not sign you in, or you canceled; sign in again.")
        if "error" in answer or not answer.get("code"):
            _refuse("error")
        if not await self._store.client.set(sign_in_key(digest(ticket)), "1", nx=True, ex=SIGN_IN_SECONDS):
            _refuse("replayed", "This sign-in is complete already; sign in again.")
        tokens = await self._exchange(provider.metadata, answer["code"], _derive(ticket, "verifier"))
        claims = await self._verify(provider, tokens.id_token, _derive(ticket, "nonce"))
        more: dict[str, Any] = {}
        endpoint, access_token = provider.metadata.userinfo_endpoint, tokens.access_token
        if endpoint and access_token and not {"email", "email_verified", *self._wanted} <= claims.keys():
            more = await self._read_userinfo(endpoint, access_token, claims["sub"])
        # Never the address of one source with the verification of the other.
        email = _find_address(claims if {"email", "email_verified"} <= claims.keys() else more)
        return Identity(email, {**more, **claims, "email": email}, page)

    def check_return(self, ticket: str, answer: Mapping[str, str]) -> str:
        """Returns the page to which the browser returns, if it began this sign-in here and not long ago.

        Raises SignInFailed, and SignInUnavailable if the client's secret cannot be read.
        """
        found = _TICKET.fullmatch(ticket)
        is_own = found is not None and hmac.compare_digest(found[4], self._sign(found[1]))
        if found is None or not is_own or not -jwt.LEEWAY_SECONDS <= time.time() - int(found[2]) <= SIGN_IN_SECONDS:
            _refuse("ticket", "This sign-in has expired or began in another browser; sign in again.")
        if not hmac.compare_digest(answer.get("state", "").encode(), _derive(ticket, "state").encode()):
            _refuse("state", "This sign-in belongs to another one, which began later; sign in again.")
        return found[3]

    def _sign(self, ticket: str) -> str:
        """Signs with the client's secret, which all processes of the service have, and nobody else but the provider."""
        return _encode(hmac.digest(self._read_secret().encode(), f"ticket {ticket}".encode(), "sha256"))

    async def _exchange(self, metadata: _Metadata, code: str, verifier: str) -> _Tokens:
        """Exchanges the code for tokens. Raises SignInFailed and SignInUnavailable."""
        client_id, secret = self._settings.oidc_client_id, self._read_secret()
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": self._redirect_uri}
        form["code_verifier"] = verifier
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
        methods = metadata.token_endpoint_auth_methods_supported or ()
        if "client_secret_basic" not in methods and "client_secret_post" in methods:
            form |= {"client_id": client_id, "client_secret": secret}
        else:
            pair = f"{quote(client_id, safe='')}:{quote(secret, safe='')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        body = await self._call("POST", metadata.token_endpoint, headers, urlencode(form).encode())
        try:
            return msgspec.json.decode(body, type=_Tokens)
        except (ValueError, RecursionError):
            _refuse("tokens")

    def _read_secret(self) -> str:
        """Raises SignInUnavailable."""
        if not self._settings.oidc_client_secret_file:
            return self._settings.oidc_client_secret
        with suppress(OSError, UnicodeDecodeError):
            if secret := Path(self._settings.oidc_client_secret_file).read_text().strip():
                return secret
        logger.error("openid.secret_unreadable")
        raise SignInUnavailable

    async def _verify(self, provider: _Provider, id_token: str, nonce: str) -> dict[str, Any]:
        """Returns the claims of the ID token. Raises SignInFailed, and SignInUnavailable while no keys can be read."""
        try:
            token = jwt.parse(id_token.encode())
            if not _is_signed(token, provider.keys):
                # The provider may have changed its keys.
                provider = await self._read_provider(since=provider.read_at)
                if not _is_signed(token, provider.keys):
                    raise TokenInvalid(reason="signature")
        except TokenInvalid as error:
            _refuse(f"token: {error.reason}")
        return _read_claims(token, self._settings.oidc_issuer, self._settings.oidc_client_id, nonce)

    async def _read_userinfo(self, endpoint: str, access_token: str, subject: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {access_token}", "Accept": "application/json"}
        body = await self._call("GET", endpoint, headers)
        try:
            claims = msgspec.json.decode(body, type=dict[str, Any])
        except (ValueError, RecursionError):
            _refuse("userinfo")
        if claims.get("sub") != subject:
            _refuse("userinfo: sub")
        return claims

    # -- the provider ----------------------------------------------------------------------------------------

    async def _read_provider(self, since: float = float("-inf")) -> _Provider:
        """Returns the provider's metadata and keys, read later than `since`. Raises SignInUnavailable."""
        async with self._reading:
            present, now = self._provider, time.monotonic()
            if present is not None and present.read_at > max(since, now - METADATA_SECONDS):
                return present
            if now - self._failed_at < FAILURE_SECONDS:
                raise SignInUnavailable
            try:
                self._provider = await self._fetch_provider()
            except SignInUnavailable:
                self._failed_at = time.monotonic()
                raise
            return self._provider

    async def _fetch_provider(self) -> _Provider:
        issuer = self._settings.oidc_issuer
        body = await self._call("GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration", down=True)
        try:
            metadata = msgspec.json.decode(body, type=_Metadata)
            if metadata.issuer != issuer:
                raise ValueError(f"the issuer is {metadata.issuer[:200]!r}, and GATEWAY_OIDC_ISSUER another one")
            endpoints = (metadata.authorization_endpoint, metadata.token_endpoint, metadata.jwks_uri)
            for endpoint in (*endpoints, metadata.userinfo_endpoint or issuer):
                if not endpoint.startswith(("https://", "http://" if issuer.startswith("http:") else "https://")):
                    raise ValueError("an address does not begin with https://")
            keys = await read_document(await self._call("GET", metadata.jwks_uri, down=True), read_key)
            if not keys:
                raise ValueError("there is no usable key")
        except (ValueError, RecursionError) as error:
            logger.error("openid.provider_unusable", error=str(error))
            raise SignInUnavailable from None
        return _Provider(metadata, keys, time.monotonic())

    async def _call(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        *,
        down: bool = False,
    ) -> bytes:
        """Returns the body of a response with 200.

        A refusal (4xx) raises SignInFailed; with `down`, it raises SignInUnavailable like all other failures.
        """
        try:
            response = await self._http.fetch(
                method, url, tenant=TENANT, headers=headers, content=content, budget=CALL_SECONDS, max_bytes=CALL_BYTES
            )
        except CallFailed as error:
            logger.warning("openid.unreachable", error=error.reason)
            raise SignInUnavailable from None
        if response.status == 200:
            return response.body
        if 400 <= response.status < 500 and response.status != 429 and not down:
            _refuse(f"status {response.status}")
        logger.warning("openid.unreachable", status=response.status)
        raise SignInUnavailable


def _refuse(reason: str, message: str | None = None) -> NoReturn:
    logger.warning("openid.refused", reason=reason)
    raise SignInFailed(message)


def _find_address(claims: Mapping[str, Any]) -> str:
    """Returns the verified address in lower case. Raises AddressNotVerified."""
    email = claims.get("email")
    if not isinstance(email, str) or not is_email(email) or claims.get("email_verified") is not True:
        logger.warning("openid.refused", reason="address")
        raise AddressNotVerified
    return email.lower()


def _is_signed(token: jwt.UnverifiedToken, keys: list[Key]) -> bool:
    """Returns whether one of the keys signed the token."""
    return any(jwt.verify_signature(token, each.key) for each in find_keys(keys, token.kid, token.alg))


def _read_claims(token: jwt.UnverifiedToken, issuer: str, client_id: str, nonce: str) -> dict[str, Any]:
    """Returns the claims of an ID token with a valid signature. Raises SignInFailed."""
    try:
        claims = {name: value for name, value in jwt.decode_claims(token).items() if value is not None}
        jwt.validate_claims(claims, issuer, client_id)
        required = msgspec.convert(claims, _IdToken)
    except TokenInvalid as error:
        _refuse(f"claims: {error.reason}")
    except msgspec.ValidationError as error:
        _refuse(f"claims: {error}")
    if required.nonce != nonce:
        _refuse("claims: nonce")
    several = isinstance(required.aud, list) and len(required.aud) > 1
    if required.azp != client_id and (several or required.azp is not None):
        _refuse("claims: azp")
    return claims


def _derive(ticket: str, purpose: str) -> str:
    return _encode(hmac.digest(ticket.encode(), purpose.encode(), "sha256"))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
