"""The caller's error and the signal for each of the provider's errors."""

from typing import Any

import msgspec
import pytest

from gateway.errors import ProviderFailed, ProviderQuotaExhausted, ProviderRefused, ServiceError
from gateway.inference.provider.errors import ProviderSignal, classify, error_status


@pytest.mark.parametrize(
    ("status", "body", "kind", "signal"),
    [
        (402, b"", ProviderQuotaExhausted, ProviderSignal.QUOTA),
        (429, b'{"error":{"code":"insufficient_quota"}}', ProviderQuotaExhausted, ProviderSignal.QUOTA),
        (429, b"slow down", ProviderQuotaExhausted, ProviderSignal.CONGESTED),
        (401, b"", ProviderFailed, ProviderSignal.DENIED),
        (400, b"", ProviderRefused, None),
        (422, b"<html>", ProviderRefused, None),
        (404, b"", ProviderFailed, ProviderSignal.REACHED),
        (302, b"", ProviderFailed, ProviderSignal.REACHED),
        (500, b"", ProviderFailed, ProviderSignal.FAILED),
    ],
)
def test_statuses(status: int, body: bytes, kind: type[ServiceError], signal: ProviderSignal | None) -> None:
    error, found = classify(status, body)
    assert (type(error), found) == (kind, signal)


def test_the_time_of_a_rate_limit_is_passed_on() -> None:
    assert classify(429, b"slow down", 7.5)[0].retry_after == 8
    assert classify(429, b"slow down")[0].retry_after == 5


@pytest.mark.parametrize(("status", "body"), [(429, b'{"error":{"code":"insufficient_quota"}}'), (402, b"")])
def test_a_quota_keeps_its_retry_after(status: int, body: bytes) -> None:
    error, signal = classify(status, body, 7.5)
    assert (type(error), error.retry_after, signal) == (ProviderQuotaExhausted, 8, ProviderSignal.QUOTA)
    assert classify(status, body)[0].retry_after is None


GOOGLE = "Quota exceeded for quota metric 'Generate requests' and limit 'per minute'. See https://example.com/billing"
RATE_LIMITS: dict[str, Any] = {
    "Google": {"error": {"code": 429, "message": GOOGLE, "status": "RESOURCE_EXHAUSTED"}},
    "OpenAI": {"error": {"code": "rate_limit_exceeded", "type": "tokens", "message": "add a payment method"}},
    "a text": {"error": "You exceeded your current quota"},
    "names of other types": {"error": {"code": ["quota"], "type": {"quota": "billing"}, "message": "x"}},
    "a member of another name": {"error": {"message": "x"}, "quota": {"billing": "credit"}},
}
QUOTAS: dict[str, Any] = {
    "OpenAI": {"code": "insufficient_quota", "type": "insufficient_quota", "message": "x"},
    "OpenAI: a limit of one's own": {"code": "billing_hard_limit_reached", "message": "x"},
    "the type alone": {"code": None, "type": "billing_error", "message": "x"},
    "DeepSeek": {"code": "insufficient_balance", "message": "x"},
    "Moonshot": {"type": "exceeded_current_quota_error", "message": "x"},
}


@pytest.mark.parametrize("case", RATE_LIMITS)
def test_a_message_names_no_quota(case: str) -> None:
    error, signal = classify(429, msgspec.json.encode(RATE_LIMITS[case]), 2.0)
    assert (type(error), error.retry_after, signal) == (ProviderQuotaExhausted, 2, ProviderSignal.CONGESTED)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("case", QUOTAS)
def test_a_code_or_a_type_names_a_quota(case: str, nested: bool) -> None:
    fields = QUOTAS[case]
    assert classify(429, msgspec.json.encode({"error": fields} if nested else fields))[1] is ProviderSignal.QUOTA


LONG, SCHEMA, FILTER = "longer than the model's context", "JSON schema", "content filter"
REFUSALS = {
    "OpenAI: context": ({"code": "context_length_exceeded", "param": "messages", "message": "x"}, LONG),
    "OpenAI: schema": ({"code": None, "param": "response_format.json_schema", "message": "x"}, SCHEMA),
    "OpenAI: a tool's schema": (
        {"code": "invalid_function_parameters", "param": "tools[0].function.parameters", "message": "x"},
        SCHEMA,
    ),
    "OpenAI: a message": ({"code": "invalid_value", "param": "messages.[2].role", "message": "x"}, "`messages`"),
    "Azure: filter": ({"code": "content_filter", "param": "prompt", "message": "x"}, FILTER),
    "vLLM": ({"code": 400, "type": "BadRequestError", "param": "input_tokens", "message": "x"}, LONG),
    "llama.cpp": ({"code": 400, "type": "exceed_context_size_error", "n_ctx": 4096, "message": "x"}, LONG),
    "vLLM, older": (
        {"code": 400, "type": "BadRequestError", "param": None, "message": "This model's maximum context length is 8"},
        LONG,
    ),
    "an unknown parameter": ({"param": "cormorant", "message": "x"}, ProviderRefused.message),
    "no names": ({"message": "x"}, ProviderRefused.message),
    "names of other types": ({"code": [], "type": {}, "param": 7, "message": {}}, ProviderRefused.message),
    "a long name": ({"code": "tools" * 20_000, "message": "x"}, ProviderRefused.message),
}


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_its_reason(case: str, nested: bool) -> None:
    fields, words = REFUSALS[case]
    error, signal = classify(400, msgspec.json.encode({"error": fields} if nested else fields))
    assert isinstance(error, ProviderRefused)
    assert words in error.message
    assert "cormorant" not in error.message
    assert (error.retry_after, signal) == (None, None)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"null", b'{"error":"x"}', b'{"error":null}', b"[" * 10_000])
def test_a_refusal_may_have_any_body(body: bytes) -> None:
    assert classify(400, body)[0].message == ProviderRefused.message
    assert LONG in classify(413, body)[0].message


@pytest.mark.parametrize(
    "code", ['"' + "9" * 5_000 + '"', '"' + "5" * 4_000 + '"', "1" + "0" * 400, '"٤٢٩"', "-500", '"4_29"']
)
def test_an_error_status_of_any_size(code: str) -> None:
    """A status of 5,000 digits counts as 500."""
    assert error_status(b'{"error":{"code":%b}}' % code.encode()) == 500


@pytest.mark.parametrize(
    ("names", "signal"),
    [
        ('"code":"insufficient_quota"', ProviderSignal.QUOTA),
        ('"code":null,"type":"billing_error"', ProviderSignal.QUOTA),
        ('"code":"insufficient_credits"', ProviderSignal.QUOTA),
        ('"code":"rate_limit_exceeded","type":"insufficient_quota"', ProviderSignal.CONGESTED),
        ('"code":"server_error"', ProviderSignal.FAILED),
        ('"code":"credit_card_detected"', ProviderSignal.FAILED),
        ('"type":"insufficient_quota","status":503', ProviderSignal.FAILED),
    ],
)
def test_an_error_event_without_a_status_means_what_its_names_mean(names: str, signal: ProviderSignal) -> None:
    """Otherwise an account's full quota looks like a failure, and three of them take the provider from everybody."""
    event = b'{"error":{"message":"x",%b}}' % names.encode()
    assert classify(error_status(event), event)[1] is signal


def test_error_status_reads_only_statuses() -> None:
    assert error_status(b'{"error":{"code":200}}') == 500
    assert error_status(b'{"error":{"code":"x","status":503}}') == 503
    assert error_status(b"nonsense") == 500
