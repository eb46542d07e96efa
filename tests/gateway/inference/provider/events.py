"""Events and errors of a provider, as bytes."""

import json

from gateway.errors import ProviderFailed, ProviderQuotaExhausted, ProviderRefused
from gateway.inference.provider.errors import ProviderSignal
from gateway.inference.provider.sse import EVENT_BYTES

FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = FINISH + b"data: [DONE]\n\n"
GARBAGE = [
    b"data: {]\n\n",
    b"data: [1]\n\n",
    b"<html>\n\n",
    b"",
    b'data: {"choices":"x"}\n\n',
    b"data: \xff\xfe\n\n",
    b'{"choices":[{"message":{"content":"x"}}]}',
    b"data: " + b"[" * 200_000 + b"\n\n",
    b"data: " + b'"' + b"x" * EVENT_BYTES + b'"\n\n',
    b"x" * (EVENT_BYTES + 1),
]
STATUSES = [  # status, body, the caller's error, the signal
    (402, b"", ProviderQuotaExhausted, ProviderSignal.QUOTA),
    (429, b'{"error":{"code":"insufficient_quota"}}', ProviderQuotaExhausted, ProviderSignal.QUOTA),
    (429, b"slow down", ProviderQuotaExhausted, ProviderSignal.CONGESTED),
    (401, b"", ProviderFailed, ProviderSignal.DENIED),
    (403, b"", ProviderFailed, ProviderSignal.DENIED),
    (400, b"", ProviderRefused, None),
    (413, b"", ProviderRefused, None),
    (422, b"<html>", ProviderRefused, None),
    (404, b"", ProviderFailed, ProviderSignal.REACHED),
    (302, b"", ProviderFailed, ProviderSignal.REACHED),
    (500, b"", ProviderFailed, ProviderSignal.FAILED),
]


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def token(text: str | None, finish: str | None = None) -> bytes:
    return event(model="m", choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])
