"""What a provider's error means for the caller, and what it reveals about the provider."""

import pytest

from gateway.errors import ProviderFailed, ProviderQuotaExhausted, ServiceError
from gateway.inference.signals import ProviderSignal, classify, error_status

STATUSES = [
    (402, b"", ProviderQuotaExhausted, ProviderSignal.QUOTA),
    (429, b'{"error":{"code":"insufficient_quota"}}', ProviderQuotaExhausted, ProviderSignal.QUOTA),
    (429, b"slow down", ProviderQuotaExhausted, ProviderSignal.REACHED),
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


def test_error_status_reads_only_statuses() -> None:
    assert error_status(b'{"error":{"code":"rate_limited"}}') == 500
    assert error_status(b'{"error":{"code":200}}') == 500
    assert error_status(b'{"error":{"code":"x","status":503}}') == 503
    assert error_status(b"nonsense") == 500
