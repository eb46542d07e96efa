"""Signs people in with OpenID Connect: the authorization code flow, with PKCE, state and nonce.

The browser keeps a ticket in a cookie while it is at the provider. The ticket is a random secret with the time and the
page to return to, and a signature of the service, so that nobody can make the service call the provider with tickets of
their own. State, nonce and PKCE verifier are derived from it, so the service stores nothing until the browser comes
back, and only the browser that began a sign-in can complete it. A ticket can be used once.

`gateway/accounts/jose` verifies the ID token with the provider's key set, as it verifies the tokens of apps' users, and
userinfo if that is a JWT. Only signatures of public keys count, never `none` or an HMAC. In all answers of the
provider, a member that is null is absent.

Failure policy: whatever is missing or wrong in what the provider or the browser sends ends the sign-in. The log has the
reason, as `openid.refused`, without addresses, tokens or codes. A provider that fails, or does not accept the service
as its client, raises SignInUnavailable.
"""

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import quote, urlencode

import msgspec
import structlog

from gateway.accounts.api_keys import digest
from gateway.accounts.jose import jwt
from gateway.accounts.jose.jwk import PublicKey, find_keys, read_document, read_key
from gateway.errors import AddressNotVerified, ServiceError, SignInFailed, SignInUnavailable, TokenInvalid
from gateway.keys import sign_in_key
from gateway.outbound.addresses import CallFailed
from gateway.outbound.client import Client, Response
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
PROMPTS = ("select_account", "login")  # that let a person change their account at the provider, the preferred one first
_TICKET = re.compile(r"((\d{1,12})\.(dashboard|ops)\.(prompt\.)?[\w-]{43})\.([\w-]{43})", re.ASCII)
# Error codes of OAuth (RFC 6749) for failures of the provider, and for a client that it does not accept:
PROVIDER_ERRORS = ("server_error", "temporarily_unavailable")
CLIENT_ERRORS = ("invalid_client", "unauthorized_client")
_ERROR = re.compile(r"[a-z_]{1,64}")

Refusal = Literal[
    "ticket",
    "state",
    "issuer",
    "denied",
    "error",
    "replayed",
    "code",
    "tokens",
    "token",
    "userinfo",
    "no-userinfo",
    "no-email",
    "email-malformed",
    "email-not-ascii",
    "no-verification",
    "not-verified",
]


class _Metadata(msgspec.Struct, frozen=True):
    """What the provider announces."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None = None
    token_endpoint_auth_methods_supported: tuple[str, ...] | None = None  # then it is client_secret_basic
    authorization_response_iss_parameter_supported: bool | None = None
    prompt_values_supported: tuple[str, ...] | None = None


class _Provider(msgspec.Struct, frozen=True):
    metadata: _Metadata
    keys: list[PublicKey]
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

    async def begin(self, page: str, *, select_account: bool = False) -> tuple[str, str]:
        """Returns the ticket, and the provider's address to which the browser goes.

        With `select_account`, the provider lets the person change their account, if it can. Raises SignInUnavailable.
        """
        metadata = (await self._read_provider()).metadata
        supported = metadata.prompt_values_supported or PROMPTS
        prompt = next((each for each in PROMPTS if each in supported), None) if select_account else None
        unsigned = f"{int(time.time())}.{page}.{'prompt.' if prompt else ''}{secrets.token_urlsafe(32)}"
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
        if prompt:
            query["prompt"] = prompt
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
            _refuse("issuer")
        error = answer.get("error")
        if error == "access_denied":
            _refuse("denied", "The identity provider did not sign you in, or you canceled; sign in again.")
        if error in PROVIDER_ERRORS:
            _fail(error=error)
        if error is not None or not answer.get("code"):
            _refuse("error", detail=error if error and _ERROR.fullmatch(error) else None)
        if not await self._store.client.set(sign_in_key(digest(ticket)), "1", nx=True, ex=SIGN_IN_SECONDS):
            _refuse("replayed", "This sign-in is complete already; sign in again.")
        tokens = await self._exchange(provider.metadata, answer["code"], _derive(ticket, "verifier"))
        claims = await self._verify(provider, tokens.id_token, _derive(ticket, "nonce"))
        sources = [claims]
        if not (_has_verification(claims) and self._wanted <= claims.keys()):
            sources += await self._read_userinfo(provider, tokens.access_token, claims["sub"])
        email = _find_address(sources, trusted=self._settings.oidc_trust_email)
        return Identity(email, {**sources[-1], **claims, "email": email}, page)

    def check_return(self, ticket: str, answer: Mapping[str, str]) -> str:
        """Returns the page to which the browser returns, if it began this sign-in here and not long ago.

        Raises SignInFailed, and SignInUnavailable if the client's secret cannot be read.
        """
        found = _TICKET.fullmatch(ticket)
        is_own = found is not None and hmac.compare_digest(found[5], self._sign(found[1]))
        if found is None or not is_own or not -jwt.LEEWAY_SECONDS <= time.time() - int(found[2]) <= SIGN_IN_SECONDS:
            _refuse("ticket", "This sign-in has expired or began in another browser; sign in again.")
        if not hmac.compare_digest(answer.get("state", "").encode(), _derive(ticket, "state").encode()):
            _refuse("state", "This sign-in belongs to another one, which began later; sign in again.")
        return found[3]

    def refuses_prompt(self, ticket: str, answer: Mapping[str, str]) -> bool:
        """Returns whether the provider may have sent an error because it does not support the prompt."""
        return ".prompt." in ticket and answer.get("error", "access_denied") not in ("access_denied", *PROVIDER_ERRORS)

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
        response = await self._call("POST", metadata.token_endpoint, headers, urlencode(form).encode())
        if response.status != 200:
            error = _read_error(response.body)
            if error in CLIENT_ERRORS:
                logger.error("openid.provider_unusable", error=f"it does not accept the client's secret: {error}")
                raise SignInUnavailable
            _refuse("code", detail=error or f"status {response.status}")
        try:
            return msgspec.json.decode(response.body, type=_Tokens)
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
            claims = await self._read_signed(provider, id_token.encode())
            jwt.validate_claims(claims, self._settings.oidc_issuer, self._settings.oidc_client_id)
            required = msgspec.convert(claims, _IdToken)
        except TokenInvalid as error:
            _refuse("token", detail=error.reason)
        except msgspec.ValidationError as error:
            _refuse("token", detail=str(error))
        if required.nonce != nonce:
            _refuse("token", detail="nonce")
        several = isinstance(required.aud, list) and len(required.aud) > 1
        if required.azp != self._settings.oidc_client_id and (several or required.azp is not None):
            _refuse("token", detail="azp")
        return claims

    async def _read_userinfo(self, provider: _Provider, access_token: str | None, subject: str) -> list[dict[str, Any]]:
        """Returns the claims of userinfo; none if the provider has no userinfo. Raises as `_verify`."""
        if not (provider.metadata.userinfo_endpoint and access_token):
            return []
        headers = {"Authorization": f"Bearer {access_token}", "Accept": "application/json, application/jwt"}
        response = await self._read(provider.metadata.userinfo_endpoint, headers)
        issuer, client_id = self._settings.oidc_issuer, self._settings.oidc_client_id
        try:
            if response.headers.get("Content-Type", "").partition(";")[0].strip().lower() == "application/jwt":
                claims = await self._read_signed(provider, response.body)
                optional = {"iss": issuer, "aud": client_id, "exp": time.time()}  # unlike in an ID token
                jwt.validate_claims(optional | claims, issuer, client_id)
            else:
                claims = _without_nulls(msgspec.json.decode(response.body, type=dict[str, Any]))
        except TokenInvalid as error:
            _refuse("userinfo", detail=error.reason)
        except (ValueError, RecursionError):
            _refuse("userinfo", detail="malformed")
        if claims.get("sub") != subject:
            _refuse("userinfo", detail="sub")
        return [claims]

    async def _read_signed(self, provider: _Provider, text: bytes) -> dict[str, Any]:
        """Returns the claims of a JWT that the provider signed. Raises TokenInvalid and SignInUnavailable."""
        token = jwt.parse(text)
        if not _is_signed(token, provider.keys):
            # The provider may have changed its keys.
            provider = await self._read_provider(since=provider.read_at)
            if not _is_signed(token, provider.keys):
                raise TokenInvalid(reason="signature")
        return _without_nulls(jwt.decode_claims(token))

    # -- the provider ----------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Raises SignInUnavailable if the provider cannot be used now. The log says why."""
        await self._read_provider()

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
        response = await self._read(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        try:
            metadata = msgspec.json.decode(response.body, type=_Metadata)
            if metadata.issuer != issuer:
                raise ValueError(f"the issuer is {metadata.issuer[:200]!r}, and GATEWAY_OIDC_ISSUER another one")
            endpoints = (metadata.authorization_endpoint, metadata.token_endpoint, metadata.jwks_uri)
            for endpoint in (*endpoints, metadata.userinfo_endpoint or issuer):
                if not endpoint.startswith(("https://", "http://" if issuer.startswith("http:") else "https://")):
                    raise ValueError("an address does not begin with https://")
            keys = await read_document((await self._read(metadata.jwks_uri)).body, read_key)
            if not keys:
                raise ValueError("there is no usable key")
        except (ValueError, RecursionError) as error:
            logger.error("openid.provider_unusable", error=str(error))
            raise SignInUnavailable from None
        return _Provider(metadata, keys, time.monotonic())

    async def _read(self, url: str, headers: Mapping[str, str] | None = None) -> Response:
        """Returns a response with the status 200. Raises SignInUnavailable."""
        response = await self._call("GET", url, headers)
        if response.status != 200:
            _fail(status=response.status)
        return response

    async def _call(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, content: bytes | None = None
    ) -> Response:
        """Returns a response with the status 200 or of a refusal (4xx). Raises SignInUnavailable for all others."""
        try:
            response = await self._http.fetch(
                method, url, tenant=TENANT, headers=headers, content=content, budget=CALL_SECONDS, max_bytes=CALL_BYTES
            )
        except CallFailed as error:
            _fail(error=error.reason)
        if response.status != 200 and (not 400 <= response.status < 500 or response.status == 429):
            _fail(status=response.status)
        return response


def _refuse(
    reason: Refusal, message: str | None = None, *, detail: str | None = None, error: type[ServiceError] = SignInFailed
) -> NoReturn:
    logger.warning("openid.refused", reason=reason, detail=detail)
    raise error(message)


def _fail(**cause: str | int) -> NoReturn:
    logger.warning("openid.unreachable", **cause)
    raise SignInUnavailable


def _read_error(body: bytes) -> str | None:
    """Returns the error code in a response of the token endpoint."""
    with suppress(ValueError, RecursionError):
        error = msgspec.json.decode(body, type=dict[str, Any]).get("error")
        return error if isinstance(error, str) and _ERROR.fullmatch(error) else None
    return None


def _find_address(sources: Sequence[Mapping[str, Any]], *, trusted: bool) -> str:
    """Returns the verified address in lower case. Raises AddressNotVerified.

    `sources` are the claims of the ID token, and of userinfo if there was a need to read that. The address and its
    verification are of one source. If none has both, and the issuer's addresses are `trusted`, an address suffices,
    unless a source says that it is not verified.
    """
    with_email = [each for each in sources if "email" in each]
    claims = next(filter(_has_verification, with_email), with_email[0] if with_email else {})
    email, verified = claims.get("email"), _is_verified(claims)
    if verified is None:
        denied = any(_is_verified(each) is False for each in sources)
        verified = False if denied else trusted or None
    if verified is None and len(sources) == 1:
        _refuse_address("no-userinfo")
    if email is None:
        _refuse_address("no-email")
    if not isinstance(email, str) or not is_email(email):
        _refuse_address("email-not-ascii" if isinstance(email, str) and not email.isascii() else "email-malformed")
    if verified is None:
        _refuse_address("no-verification")
    if not verified:
        _refuse_address("not-verified")
    return email.lower()


def _refuse_address(reason: Refusal) -> NoReturn:
    unusable = (
        "The identity provider sends no verified e-mail address of yours that this service can use; "
        "tell the operator of this service."
    )
    # The person can change only whether the provider has verified the address.
    _refuse(reason, None if reason == "not-verified" else unusable, error=AddressNotVerified)


def _has_verification(claims: Mapping[str, Any]) -> bool:
    return "email" in claims and _is_verified(claims) is not None


def _is_verified(claims: Mapping[str, Any]) -> bool | None:
    """Returns whether the provider has verified the address; None if the claims do not say.

    AWS Cognito says it as a text. Entra ID has a claim of its own, whose form depends on the version of the token.
    """
    if "email_verified" in claims:
        return claims["email_verified"] is True or claims["email_verified"] == "true"
    return claims["xms_edov"] in (True, "1", "true") if "xms_edov" in claims else None  # 1 is True


def _without_nulls(claims: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in claims.items() if value is not None}


def _is_signed(token: jwt.UnverifiedToken, keys: list[PublicKey]) -> bool:
    """Returns whether one of the keys signed the token."""
    return any(jwt.verify_signature(token, each.key) for each in find_keys(keys, token.kid, token.alg))


def _derive(ticket: str, purpose: str) -> str:
    return _encode(hmac.digest(ticket.encode(), purpose.encode(), "sha256"))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
