"""Events of a provider, as bytes."""

import json

FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = FINISH + b"data: [DONE]\n\n"


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def token(text: str | None, finish: str | None = None) -> bytes:
    return event(model="m", choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])
