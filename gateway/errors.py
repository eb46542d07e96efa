"""The errors in responses: one class per code, and one way to render them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

Headers = list[tuple[bytes, bytes]]

# Why a token was refused. Only the app's owner learns it: users get one code for all of them.
TokenFault = Literal[
    "expired",
    "not-yet",
    "audience",
    "issuer",
    "signature",
    "unknown-key",
    "algorithm",
    "malformed",
    "user",
    "backend-status",
    "backend-unreachable",
    "keys-unreadable",
]


class ServiceError(Exception):
    """An error for the caller. Its message says what to do next, and never contains a prompt, an answer or a secret."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "INTERNAL"
    message: str = (
        "Something failed on our side. It is logged with this request id; contact the operator if it persists."
    )
    permanent: ClassVar[bool] = False  # a retry cannot succeed
    # The values of errors that are raised without any:
    retry_after: int | None = None
    own_headers: ClassVar[Headers] = []
    reason: TokenFault | None = None
    limits: tuple[tuple[int, int] | None, ...] = ()  # in force: `LimitUses` of gateway/telemetry/usage.py
    details: Mapping[str, Any] = {}  # more fields of the response's error

    def __init__(
        self,
        message: str | None = None,
        *,
        retry_after: float | None = None,
        headers: Headers | None = None,
        reason: TokenFault | None = None,
    ) -> None:
        super().__init__(message or self.message)
        self.reason = reason or self.reason
        self.message = message or self.message
        if retry_after is not None:
            # Rounded up to whole seconds, so that a caller who waits this long is not refused again.
            self.retry_after = max(1, math.ceil(retry_after))
        self.headers = [*self.own_headers] if headers is None else headers

    def event(self) -> dict[str, str]:
        """Returns the error as the data of a stream's event."""
        return {"code": self.code, "message": self.message}

    def render(self, request_id: str, *, charged: bool = False) -> tuple[Headers, bytes]:
        """Returns the headers and the body. If the request was `charged`, a retry would be charged again."""
        body = msgspec.json.encode({"error": {**self.event(), "requestId": request_id, **self.details}})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if self.retry_after is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after))
        if self.permanent or charged:  # keeps the OpenAI SDKs from retrying
            headers.append((b"x-should-retry", b"false"))
        return headers + self.headers, body


class InferenceDisabled(ServiceError):
    status, code = 503, "INFERENCE_DISABLED"
    message = "Managed inference is turned off; ask the operator of this service, or try again later."
    permanent = True


class AppNotFound(ServiceError):
    status, code = 404, "APP_NOT_FOUND"
    message = "There is no app with this name; check the address in the app's build."


class AppSuspended(ServiceError):
    """The reason of the suspension is for the app's owner and operators, so it is not in the message."""

    status, code = 403, "APP_SUSPENDED"
    message = "This app is suspended; its owner finds the reason in the dashboard, and can ask the operator to lift it."


class OriginNotAllowed(ServiceError):
    status, code = 403, "ORIGIN_NOT_ALLOWED"
    message = "In a browser, only pages of the app's own hostname or verified custom domain may call this."


class TokenMissing(ServiceError):
    status, code = 401, "TOKEN_MISSING"
    message = "Sign in first: send the app user's token as 'Authorization: Bearer <token>'."
    own_headers: ClassVar = [(b"www-authenticate", b"Bearer")]


class TokenInvalid(TokenMissing):
    code = "TOKEN_INVALID"
    message = "The token is not valid for this app, or has expired; sign in again."
    reason = "malformed"


class AppBackendUnreachable(ServiceError):
    status, code = 503, "APP_BACKEND_UNREACHABLE"
    message = "The app's own backend could not be reached to check this token; try again shortly."
    reason = "backend-unreachable"


class TokensLimited(ServiceError):
    """The time that an app's invalid tokens may take for their verification."""

    status, code = 429, "TOKENS_LIMITED"
    message = "Too many tokens of this app were invalid just now; try again after the time in Retry-After."


class AppRateLimited(ServiceError):
    """Requests of an app in any minute."""

    status, code = 429, "APP_RATE_LIMITED"
    message = "The app has reached its limit of requests per minute; try again after the time in Retry-After."


class UserRateLimited(ServiceError):
    """Requests of a user of an app in any minute."""

    status, code = 429, "USER_RATE_LIMITED"
    message = "You have reached your limit of requests per minute; try again after the time in Retry-After."


class SpendCapReached(ServiceError):
    status, code = 402, "SPEND_CAP_REACHED"
    message = (
        "This request could exceed the account's spending cap for today; shorten the prompt, request fewer tokens, "
        "wait for the reset at 00:00 UTC, or choose a larger plan."
    )


class AppCapReached(ServiceError):
    status, code = 402, "APP_CAP_REACHED"
    message = (
        "This request could exceed the app's spending cap for today; shorten the prompt, request fewer tokens, "
        "wait for the reset at 00:00 UTC, or ask the app's owner to raise the cap."
    )


class UserCapReached(ServiceError):
    status, code = 402, "USER_CAP_REACHED"
    message = (
        "This request could exceed your spending cap in this app for today; shorten the prompt, request fewer tokens, "
        "or wait for the reset at 00:00 UTC."
    )


class RequestMalformed(ServiceError):
    status, code = 400, "REQUEST_MALFORMED"


class RequestTooLarge(ServiceError):
    status, code = 413, "REQUEST_TOO_LARGE"
    message = "The request is larger than 100 KB (102400 bytes); shorten the prompt."


class MediaTypeUnsupported(ServiceError):
    status, code = 415, "MEDIA_TYPE_UNSUPPORTED"
    message = "Send the source as application/gzip (a tar.gz), application/zip or text/html (one page)."


class MultimodalUnsupported(ServiceError):
    status, code = 422, "MULTIMODAL_UNSUPPORTED"
    message = "Only text is supported; remove images, audio, video and files."


class ModelNotAllowed(ServiceError):
    status, code = 400, "MODEL_NOT_ALLOWED"


class ProviderUnreachable(ServiceError):
    status, code = 502, "PROVIDER_UNREACHABLE"
    message = "The model could not be reached; try again shortly."
    retry_after = 1


class ProviderFailed(ServiceError):
    status, code = 502, "PROVIDER_ERROR"
    message = "The model failed to answer; try again."


class ProviderTimeout(ServiceError):
    status, code = 504, "PROVIDER_TIMEOUT"
    message = "The model took too long; try again, or request fewer tokens."


class ProviderQuotaExhausted(ServiceError):
    status, code = 503, "PROVIDER_QUOTA_EXHAUSTED"
    message = "The model has no capacity left for this service right now; try again later."


# Faults of the provider. A refusal is not a fault: the provider works, and the caller must change the request.
PROVIDER_FAULT_CODES = frozenset(
    fault.code for fault in (ProviderUnreachable, ProviderFailed, ProviderTimeout, ProviderQuotaExhausted)
)


class ProviderRefused(ServiceError):
    status, code = 400, "PROVIDER_REFUSED"
    message = "The model rejects this request, and a retry would fail too; shorten it, or remove optional parameters."


class BackboneUnavailable(ServiceError):
    status, code = 503, "BACKBONE_UNAVAILABLE"
    message = "The service cannot reach its database; nothing was sent or charged. Try again shortly."
    retry_after = 1


class BackboneRefused(BackboneUnavailable):
    """Redis answered with an error, so nothing has changed."""


class NotReplicated(BackboneUnavailable):
    """A write that too few replicas confirm, such as a reservation, which its caller then releases."""

    message = "Too few replicas of the service's database respond; nothing was sent or charged. Try again shortly."


class StorageUnavailable(ServiceError):
    status, code = 503, "STORAGE_UNAVAILABLE"
    message = "The service cannot reach its storage for sources and releases; nothing was deployed. Try again shortly."
    retry_after: int | None = 5


class StorageFull(StorageUnavailable):
    """Room must be made before a retry can succeed."""

    status, code = 507, "STORAGE_FULL"
    message = "The disk of the service is full; nothing was stored. Tell the operator, who must make room there."
    retry_after = None


class Unauthorized(ServiceError):
    status, code = 401, "UNAUTHORIZED"
    message = "Send a valid API key or operator token as 'Authorization: Bearer <key>'."
    own_headers: ClassVar = [(b"www-authenticate", b"Bearer")]


class CsrfRefused(ServiceError):
    status, code = 403, "CSRF_REFUSED"
    message = "In a browser, only the service's own pages may do this; elsewhere, use an API key instead of a session."


class LoginsLimited(ServiceError):
    """Failed log-ins from one address, or one /64 of IPv6."""

    status, code = 429, "LOGINS_LIMITED"
    message = "Too many failed logins from your address; try again after the time in Retry-After."


class ViewersLimited(ServiceError):
    """Open pages that follow changes."""

    status, code = 429, "VIEWERS_LIMITED"
    message = "This page is open too many times; close it elsewhere, then try again."


class NotFound(ServiceError):
    status, code = 404, "NOT_FOUND"
    message = "There is nothing at this address, or it belongs to another account."


class MethodNotAllowed(ServiceError):
    status, code = 405, "METHOD_NOT_ALLOWED"

    def __init__(self, *methods: str) -> None:
        allowed = ", ".join(methods)
        super().__init__(f"Use {allowed} at this address.", headers=[(b"allow", allowed.encode())])


class RateLimited(ServiceError):
    """Requests of an account that cost the service much, as the message says."""

    status, code = 429, "RATE_LIMITED"
    message = (
        "An account may request 30 test events and redeliveries per minute; try again after the time in Retry-After."
    )


class NotPermitted(ServiceError):
    """The scope of the API key does not include the call, or the role of the member does not."""

    status, code = 403, "NOT_PERMITTED"
    message = "This API key does not include this call; use a key with a wider scope."


class LastOwner(ServiceError):
    status, code = 409, "LAST_OWNER"
    message = "This is the account's only owner. Make another member an owner first."


class InvitationLimitReached(ServiceError):
    status, code = 409, "INVITATION_LIMIT_REACHED"
    message = "The account has 50 open invitations; cancel one of them first, or wait until one is answered."


class AccountNotChosen(ServiceError):
    status, code = 409, "ACCOUNT_NOT_CHOSEN"
    message = "You belong to several accounts; choose one of them in the dashboard."

    def __init__(self, accounts: Sequence[msgspec.Struct] = ()) -> None:
        """`accounts` are those of the person: `AccountChoice` of gateway/accounts/members.py."""
        none = "You belong to no account. Accept an invitation in the dashboard, or sign in again to create an account."
        super().__init__(None if accounts else none)
        self.details = {"accounts": accounts}


class SignInFailed(ServiceError):
    status, code = 400, "SIGN_IN_FAILED"
    message = "The sign-in could not be completed; sign in again."


class AddressNotVerified(ServiceError):
    status, code = 403, "ADDRESS_NOT_VERIFIED"
    message = (
        "The identity provider has not verified an e-mail address of yours; "
        "verify your address there, then sign in again."
    )


class SignInUnavailable(ServiceError):
    status, code = 503, "SIGN_IN_UNAVAILABLE"
    message = (
        "The identity provider cannot be used right now; try again in a minute. "
        "If it persists, tell the operator of this service."
    )
    retry_after = 5


class LastKey(ServiceError):
    status, code = 409, "LAST_KEY"
    message = "This is the account's only API key with full access. Create another one first, then revoke this one."


class NameTaken(ServiceError):
    status, code = 409, "NAME_TAKEN"
    message = "This name is taken; choose another."


class AppLimitReached(ServiceError):
    """Apps of an account, by its plan."""

    status, code = 429, "APP_LIMIT_REACHED"
    message = "The account has as many apps as its plan allows; delete one, or choose a larger plan."


class DomainLimitReached(ServiceError):
    status, code = 409, "DOMAIN_LIMIT_REACHED"
    message = "An app has at most 5 domains; remove one first."


class HookRateLimited(ServiceError):
    """Requests to a deploy hook in any minute."""

    status, code = 429, "HOOK_RATE_LIMITED"
    message = "A hook accepts 6 requests per minute; try again after the time in Retry-After."


class NoDeployYet(ServiceError):
    status, code = 409, "NO_DEPLOY_YET"
    message = "This app has never been live; publish it or connect a repository, then try again."


class TarballGone(ServiceError):
    status, code = 410, "TARBALL_GONE"
    message = "The source of this deploy is not stored; publish the app or connect a repository, then try again."


class DeployQuotaReached(ServiceError):
    """Deploys of an account on a UTC day, by its plan."""

    status, code = 429, "DEPLOY_QUOTA_REACHED"
    message = "The plan's deploys for today are used up; try again after 00:00 UTC, or choose a larger plan."


class RegistrationsClosed(ServiceError):
    """Registrations of a UTC day: of all, without a sign-in, and from one address or one /64 of IPv6."""

    status, code = 429, "REGISTRATIONS_CLOSED"
    message = "Today's registrations are used up; try again after 00:00 UTC."
