"""What an attempt reveals about the provider, and the error that its caller receives.

Pure functions of a status and a body: connection.py applies them to HTTP answers, sse.py to error events.
"""

from __future__ import annotations

import enum
import re

import msgspec

from gateway.errors import ProviderFailed, ProviderQuotaExhausted, ServiceError

DEFAULT_RETRY_AFTER = 5.0  # seconds, when a rate limit names no time

_QUOTA = re.compile(rb"quota|billing|insufficient|credit|payment", re.IGNORECASE)
_ERROR_STATUS = re.compile(r"[45][0-9]{2}")


class ProviderSignal(enum.Enum):
    """What one request or probe revealed about the provider."""

    COMPLETION = "the provider sent a complete answer"
    REACHED = "the provider answered, perhaps with a refusal of this one request"
    CONGESTED = "429 that names no quota: the provider serves too many requests at once"
    FAILED = "no connection, silence, or a 5xx"
    QUOTA = "402, or 429 that names quota or billing and no time"
    REFUSED = "a probe confirmed that the provider refuses the credential"


def classify(status: int, body: bytes, retry_after: float | None = None) -> tuple[ServiceError, ProviderSignal | None]:
    """The caller's error for a provider's error status, and the signal.

    The signal is None for 401 and 403: a probe has to confirm them first. A quota that names the time of its end passes
    by itself, as a rate limit does.
    """
    if status == 402 or (status == 429 and retry_after is None and _QUOTA.search(body)):
        return ProviderQuotaExhausted(retry_after=retry_after), ProviderSignal.QUOTA
    if status == 429:
        signal = ProviderSignal.REACHED if _QUOTA.search(body) else ProviderSignal.CONGESTED
        return ProviderQuotaExhausted(retry_after=retry_after or DEFAULT_RETRY_AFTER), signal
    if status in (401, 403):
        return ProviderFailed(), None
    return ProviderFailed(), ProviderSignal.FAILED if status >= 500 else ProviderSignal.REACHED


def error_status(body: bytes) -> int:
    """The status inside an error event, nested or flat. Returns 500 if the event names none."""
    try:
        event = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 500
    error = event.get("error", event) if isinstance(event, dict) else None
    for name in ("code", "status", "status_code"):
        value = error.get(name) if isinstance(error, dict) else None
        # Not converted as it is: a number or a text of many digits would raise an error.
        if isinstance(value, str) and _ERROR_STATUS.fullmatch(value):
            return int(value)
        if isinstance(value, int) and 400 <= value <= 599:
            return value
    return 500
