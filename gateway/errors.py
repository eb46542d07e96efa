"""The errors that callers see: one class per code, and one way to render them."""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

Headers = list[tuple[bytes, bytes]]


class ServiceError(Exception):
    """An error for the caller. The message says what to do next, and never holds content or a secret."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "INTERNAL"
    message: str = "Something failed on our side; it is logged under this request id."
    # `x-should-retry: false` keeps the OpenAI SDKs from retrying what a retry cannot mend.
    hopeless: ClassVar[bool] = False

    def __init__(
        self, message: str | None = None, *, retry_after: float | None = None, headers: Headers | None = None
    ) -> None:
        super().__init__(message or self.message)
        self.message = message or self.message
        # Rounded up to whole seconds: a caller that waits as told must not be refused again.
        self.retry_after = None if retry_after is None else max(1, math.ceil(retry_after))
        self.headers: Headers = headers or []

    def event(self) -> dict[str, str]:
        """The error as an event of a running stream."""
        return {"code": self.code, "message": self.message}

    def render(self, request_id: str) -> tuple[Headers, bytes]:
        body = msgspec.json.encode({"error": {**self.event(), "requestId": request_id}})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if self.retry_after is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after))
        if self.hopeless:
            headers.append((b"x-should-retry", b"false"))
        return headers + self.headers, body


class InferenceDisabled(ServiceError):
    status, code = 503, "INFERENCE_DISABLED"
    message = "Managed inference is off at this service; ask its operator, or try again later."
    hopeless = True


class AppNotFound(ServiceError):
    status, code = 404, "APP_NOT_FOUND"
    message = "No app of this name is hosted here; check the address the app was built with."


class OriginNotAllowed(ServiceError):
    status, code = 403, "ORIGIN_NOT_ALLOWED"
    message = "Only the app's own hostname or its verified custom domain may call this from a browser."


class TokenMissing(ServiceError):
    status, code = 401, "TOKEN_MISSING"
    message = "Sign in first: send the app user's token as 'Authorization: Bearer <token>'."

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message, headers=[(b"www-authenticate", b"Bearer")])


class TokenInvalid(TokenMissing):
    code = "TOKEN_INVALID"
    message = "The token is not valid for this app, or has expired; sign in again."


class AppBackendUnreachable(ServiceError):
    status, code = 503, "APP_BACKEND_UNREACHABLE"
    message = "The app's own backend could not be asked about this token; try again shortly."


class AppRateLimited(ServiceError):
    status, code = 429, "APP_RATE_LIMITED"
    message = "The app has used all its requests of this minute; try again after the time in Retry-After."


class UserRateLimited(ServiceError):
    status, code = 429, "USER_RATE_LIMITED"
    message = "You have used all your requests of this minute; try again after the time in Retry-After."


class SpendCapReached(ServiceError):
    status, code = 402, "SPEND_CAP_REACHED"
    message = (
        "This request could exceed the account's spending cap for today; ask for fewer tokens, "
        "wait for the reset at 00:00 UTC, or choose a larger plan."
    )


class AppCapReached(ServiceError):
    status, code = 402, "APP_CAP_REACHED"
    message = (
        "This request could exceed what the app may spend today; ask for fewer tokens, "
        "wait for the reset at 00:00 UTC, or ask the app's owner to raise its limit."
    )


class UserCapReached(ServiceError):
    status, code = 402, "USER_CAP_REACHED"
    message = (
        "This request could exceed what you may spend in this app today; ask for fewer tokens, "
        "or wait for the reset at 00:00 UTC."
    )


class RequestMalformed(ServiceError):
    status, code = 400, "REQUEST_MALFORMED"


class RequestTooLarge(ServiceError):
    status, code = 413, "REQUEST_TOO_LARGE"
    message = "A request holds at most 100 KB (102400 bytes); shorten the prompt."


class MultimodalUnsupported(ServiceError):
    status, code = 422, "MULTIMODAL_UNSUPPORTED"
    message = "Only text is accepted: no images, audio, video or files."


class ModelNotAllowed(ServiceError):
    status, code = 400, "MODEL_NOT_ALLOWED"


class ProviderUnreachable(ServiceError):
    status, code = 502, "PROVIDER_UNREACHABLE"
    message = "The model could not be reached; try again shortly."


class ProviderFailed(ServiceError):
    status, code = 502, "PROVIDER_ERROR"
    message = "The model failed to answer; try again."


class ProviderTimeout(ServiceError):
    status, code = 504, "PROVIDER_TIMEOUT"
    message = "The model took too long; try again, or ask for fewer tokens."


class ProviderQuotaExhausted(ServiceError):
    status, code = 503, "PROVIDER_QUOTA_EXHAUSTED"
    message = "The model has no capacity left for this service right now; try again later."


# What fails at the provider. A refusal is none: the provider works, and the caller's request has to change.
PROVIDER_FAULT_CODES = frozenset(
    fault.code for fault in (ProviderUnreachable, ProviderFailed, ProviderTimeout, ProviderQuotaExhausted)
)


class ProviderRefused(ServiceError):
    status, code = 400, "PROVIDER_REFUSED"
    message = (
        "The model does not accept this request, and would refuse it again; "
        "shorten it, or leave out what it does not need."
    )


class BackboneUnavailable(ServiceError):
    status, code = 503, "BACKBONE_UNAVAILABLE"
    message = "The service cannot reach its store; nothing was sent or charged. Try again shortly."

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message, retry_after=1)


class BackboneRefused(BackboneUnavailable):
    """Redis answered with an error, so it has changed nothing."""


class NotReplicated(BackboneUnavailable):
    """A reservation was made, but too few replicas have it. The caller releases it."""

    message = "Too few replicas of the service's store answer; nothing was sent or charged. Try again shortly."


class StorageUnavailable(ServiceError):
    status, code = 503, "STORAGE_UNAVAILABLE"
    message = "The service cannot reach the storage of sources and releases; nothing was deployed. Try again shortly."

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message, retry_after=5)


class Unauthorized(ServiceError):
    status, code = 401, "UNAUTHORIZED"
    message = "Send a valid credential as 'Authorization: Bearer <key>'."

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message, headers=[(b"www-authenticate", b"Bearer")])


class CsrfRefused(ServiceError):
    status, code = 403, "CSRF_REFUSED"
    message = "With a session cookie, only the service's own pages may change something; use the API key instead."


class LoginsLimited(ServiceError):
    status, code = 429, "LOGINS_LIMITED"
    message = "Too many failed logins from your address; try again after the time in Retry-After."


class ViewersLimited(ServiceError):
    status, code = 429, "VIEWERS_LIMITED"
    message = "Too many viewers have this page open; close one of them."


class NotFound(ServiceError):
    status, code = 404, "NOT_FOUND"
    message = "There is nothing here, or it is not yours."


class MethodNotAllowed(ServiceError):
    status, code = 405, "METHOD_NOT_ALLOWED"

    def __init__(self, *methods: str) -> None:
        allowed = ", ".join(methods)
        super().__init__(f"Use {allowed} at this address.", headers=[(b"allow", allowed.encode())])


class RateLimited(ServiceError):
    status, code = 429, "RATE_LIMITED"
    message = (
        "An account can request 30 test events and redeliveries per minute; try again after the time in Retry-After."
    )


class LastKey(ServiceError):
    status, code = 409, "LAST_KEY"
    message = "This is the account's only API key. Create another one first, then revoke this one."


class NameTaken(ServiceError):
    status, code = 409, "NAME_TAKEN"
    message = "This name is taken; choose another."


class AppLimitReached(ServiceError):
    status, code = 429, "APP_LIMIT_REACHED"
    message = "The account has as many apps as its plan allows; delete one, or choose a larger plan."


class HookRateLimited(ServiceError):
    status, code = 429, "HOOK_RATE_LIMITED"
    message = "A hook accepts 6 triggers per minute; try again after the time in Retry-After."


class NoDeployYet(ServiceError):
    status, code = 409, "NO_DEPLOY_YET"
    message = "This app has never been live: publish it once, or connect a repository, and trigger again."


class TarballGone(ServiceError):
    status, code = 410, "TARBALL_GONE"
    message = "The stored source has been cleaned up: publish once, or connect a repository, and trigger again."


class DeployQuotaReached(ServiceError):
    status, code = 429, "DEPLOY_QUOTA_REACHED"
    message = "The plan's deploys for today are used up; the count resets at 00:00 UTC."


class RegistrationsClosed(ServiceError):
    status, code = 429, "REGISTRATIONS_CLOSED"
    message = "Today's registrations are used up; try again after 00:00 UTC."
