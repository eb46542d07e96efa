"""What a provider's error means for the caller, and what it reveals about the provider."""

import pytest

from gateway.errors import ProviderFailed, ProviderQuotaExhausted, ServiceError
from gateway.inference.signals import ProviderSignal, classify, error_status

STATUSES = [
    (402, b"", ProviderQuotaExhausted, ProviderSignal.QUOTA),
    (429, b'{"error":{"code":"insufficient_quota"}}', ProviderQuotaExhausted, ProviderSignal.QUOTA),
    (429, b"slow down", ProviderQuotaExhausted, ProviderSignal.CONGESTED),
    (401, b"", ProviderFailed, None),
    (403, b"", ProviderFailed, None),
    (400, b"", ProviderFailed, ProviderSignal.REACHED),
    (302, b"", ProviderFailed, ProviderSignal.REACHED),
    (500, b"", ProviderFailed, ProviderSignal.FAILED),
]


@pytest.mark.parametrize(("status", "body", "kind", "signal"), STATUSES)
def test_statuses(status: int, body: bytes, kind: type[ServiceError], signal: ProviderSignal | None) -> None:
    error, found = classify(status, body)
    assert (type(error), found) == (kind, signal)


def test_a_rate_limit_passes_on_its_time() -> None:
    assert classify(429, b"slow down", 7.5)[0].retry_after == 8
    assert classify(429, b"slow down")[0].retry_after == 5


def test_a_quota_with_a_time_passes() -> None:
    """A 429 that names quota lost its `Retry-After`, and each one marked the quota as used up for everybody."""
    error, signal = classify(429, b'{"error":{"message":"quota per minute exceeded"}}', 7.5)
    assert (type(error), error.retry_after, signal) == (ProviderQuotaExhausted, 8, ProviderSignal.REACHED)
    error, signal = classify(402, b"", 7.5)
    assert (error.retry_after, signal) == (8, ProviderSignal.QUOTA), "a bill that is not paid does not pass by itself"


@pytest.mark.parametrize(
    "code", ['"' + "9" * 5_000 + '"', '"' + "5" * 4_000 + '"', "1" + "0" * 400, '"٤٢٩"', "-500", '"4_29"']
)
def test_an_error_status_of_any_size(code: str) -> None:
    """A status of 5,000 digits raised ValueError, which broke the stream instead of ending it with its error."""
    assert error_status(b'{"error":{"code":%b}}' % code.encode()) == 500


def test_error_status_reads_only_statuses() -> None:
    assert error_status(b'{"error":{"code":"rate_limited"}}') == 500
    assert error_status(b'{"error":{"code":200}}') == 500
    assert error_status(b'{"error":{"code":"x","status":503}}') == 503
    assert error_status(b"nonsense") == 500
