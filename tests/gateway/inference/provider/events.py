"""Events and errors of a provider, as bytes."""

import json

from gateway.errors import ProviderFailed, ProviderQuotaExhausted, ProviderRefused
from gateway.inference.provider.errors import ProviderSignal

FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = FINISH + b"data: [DONE]\n\n"
STATUSES = [  # status, body, the caller's error, the signal
    (402, b"", ProviderQuotaExhausted, ProviderSignal.QUOTA),
    (429, b'{"error":{"code":"insufficient_quota"}}', ProviderQuotaExhausted, ProviderSignal.QUOTA),
    (429, b"slow down", ProviderQuotaExhausted, ProviderSignal.CONGESTED),
    (401, b"", ProviderFailed, ProviderSignal.DENIED),
    (400, b"", ProviderRefused, None),
    (422, b"<html>", ProviderRefused, None),
    (404, b"", ProviderFailed, ProviderSignal.REACHED),
    (302, b"", ProviderFailed, ProviderSignal.REACHED),
    (500, b"", ProviderFailed, ProviderSignal.FAILED),
]


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def token(text: str | None, finish: str | None = None) -> bytes:
    return event(model="m", choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])
