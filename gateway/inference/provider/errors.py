"""Maps a provider's error to the caller's error, and to a signal about the provider's state.

Pure functions of a status and a body. connection.py applies them to HTTP answers, sse.py to error events.
"""

import enum
import re
from typing import Any

import msgspec

from gateway.errors import ProviderFailed, ProviderQuotaExhausted, ProviderRefused, ServiceError
from gateway.inference.formats.payload import FORWARDED

DEFAULT_RETRY_SECONDS = 5.0  # if a rate limit names no time
NAME_CHARACTERS = 100  # of an error's code, type or parameter that are read

# The code or type of a 429. Only these name a quota: a message often links to a page about quotas for a short wait.
_QUOTA = re.compile(r"quota|billing|credit|payment|balance", re.I)
_RATE = re.compile(r"rate_?limit", re.I)
# The code or type of an error event without a status. Other names with such words may be about a prompt, or a fault.
_LIMITED = re.compile(
    r"quota|billing|rate_?limit|payment_required|(insufficient|no|low|out_of)_?(credit|balance|funds)", re.I
)
_ERROR_STATUS = re.compile(r"[45][0-9]{2}")

_TOO_LONG = "The request is longer than the model's context; shorten the prompt, or leave out older messages."
# The reason for a refusal, by its code, type and parameter. The first match counts.
_OBJECTIONS = (
    (re.compile(r"context_?(length|size|window)|too_(long|large)|above_max_length|input_tokens", re.I), _TOO_LONG),
    (
        re.compile(r"content_?(filter|policy)|moderation", re.I),
        "The provider's content filter refused the request; change its text.",
    ),
    (
        re.compile(r"schema|function_?parameters|tools\S*parameters", re.I),
        "The model does not support a JSON schema of the request; simplify the schema in `response_format` or `tools`.",
    ),
)
# The parameters that a message may name; the provider could write anything into `param`.
_PARAMETERS = ("messages", "max_tokens", *FORWARDED)


class ProviderSignal(enum.Enum):
    """A signal about the provider's state, from one request or probe."""

    COMPLETION = "the provider sent a complete answer"
    RECOVERED = "the request that tries an unhealthy provider got its first token"
    REACHED = "the provider answered, perhaps with a refusal of this one request"
    CONGESTED = "429 whose code and type name no quota: the provider serves too many requests at once"
    FAILED = "no connection, silence, a 5xx, or an answer that cannot be read"
    DENIED = "401 or 403, which a probe has to confirm"
    QUOTA = "402, or 429 whose code or type names quota or billing"
    REFUSED = "a probe confirmed that the provider refuses the credential"


# Every request compares with these two. The class would take 0.3 µs to find each.
COMPLETION, CONGESTED = ProviderSignal.COMPLETION, ProviderSignal.CONGESTED


def classify(status: int, body: bytes, retry_after: float | None = None) -> tuple[ServiceError, ProviderSignal | None]:
    """Returns the caller's error for a provider's error status, and the signal.

    The signal is None for a refusal of the request, which reveals nothing about the provider.
    """
    if status == 402 or (status == 429 and _names_quota(body)):
        return ProviderQuotaExhausted(retry_after=retry_after), ProviderSignal.QUOTA
    if status == 429:
        return ProviderQuotaExhausted(retry_after=retry_after or DEFAULT_RETRY_SECONDS), ProviderSignal.CONGESTED
    if status in (401, 403):
        return ProviderFailed(), ProviderSignal.DENIED
    if status in (400, 413, 422):
        return ProviderRefused(_objection(status, body)), None
    if status not in (503, 529):
        retry_after = None
    return ProviderFailed(retry_after=retry_after), ProviderSignal.FAILED if status >= 500 else ProviderSignal.REACHED


def _names_quota(body: bytes) -> bool:
    """Returns whether a 429 is for a quota that is used up. A code of a rate limit outweighs the type."""
    code, kind = _names(_error_object(body), "code", "type")
    return not _RATE.search(code) and any(map(_QUOTA.search, (code, kind)))


def _objection(status: int, body: bytes) -> str | None:
    """Returns the reason for a refusal in the service's words: the provider's own may repeat the prompt."""
    error = _error_object(body)
    code, kind, parameter = _names(error, "code", "type", "param")
    for pattern, objection in _OBJECTIONS:
        if any(pattern.search(name) for name in (code, kind, parameter)):
            return objection
    # vLLM's message, which has no code of its own
    if status == 413 or "maximum context length" in str(error.get("message")):
        return _TOO_LONG
    parameter = re.split(r"[.\[]", parameter, maxsplit=1)[0]
    return f"The model does not accept `{parameter}` as it was sent; change it." if parameter in _PARAMETERS else None


def _error_object(body: bytes) -> dict[str, Any]:
    """Returns the error object in a body or an event, nested or flat; empty if there is none."""
    try:
        event = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    error = event.get("error", event) if isinstance(event, dict) else None
    return error if isinstance(error, dict) else {}


def _names(error: dict[str, Any], *fields: str) -> list[str]:
    """Returns the beginnings of these fields' values. A value that is not text counts as empty."""
    values = [error.get(field) for field in fields]
    return [value[:NAME_CHARACTERS] if isinstance(value, str) else "" for value in values]


def is_error(event: bytes) -> bool:
    """Returns whether an event is an error object with a message."""
    return b'"message"' in event and bool(_error_object(event).get("message"))


def error_status(body: bytes) -> int:
    """Returns the status in an error event. If it has none: 429 if its code or type names a quota or rate, else 500."""
    error = _error_object(body)
    for name in ("code", "status", "status_code"):
        value = error.get(name)
        # Checked before the conversion: a number or a text of many digits would raise an error.
        if isinstance(value, str) and _ERROR_STATUS.fullmatch(value):
            return int(value)
        if isinstance(value, int) and 400 <= value <= 599:
            return value
    return 429 if any(map(_LIMITED.search, _names(error, "code", "type"))) else 500
