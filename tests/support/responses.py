"""Checks that apply to every response of the gateway."""

import json
from typing import Any

import httpx
import httpx_sse

RATE_HEADERS = ("RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset")


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Checks the shape of an error, and returns its inner object."""
    assert (response.status_code, response.text and _code(response)) == (status, code), response.text
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() - {"accounts"} == {"code", "message", "requestId"}
    assert ("accounts" in error) == (code == "ACCOUNT_NOT_CHOSEN")
    assert error["message"]
    assert error["requestId"] == response.headers["X-Request-Id"]
    assert response.headers["Content-Type"].startswith("application/json")
    if status == 429:
        assert int(response.headers["Retry-After"]) >= 1
    return error


def _code(response: httpx.Response) -> Any:
    try:
        return response.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None


def counted(response: httpx.Response) -> tuple[int, int, int]:
    """Returns limit, remaining and reset (seconds) of the stricter rate limit."""
    assert response.headers["X-Request-Id"]
    return tuple(int(response.headers[name]) for name in RATE_HEADERS)


def answered(response: httpx.Response) -> dict[str, Any]:
    """Checks a complete answer in the native format, and returns it."""
    assert response.status_code == 200, response.text
    counted(response)
    body = response.json()
    assert body.keys() == {"text", "model", "finishReason", "usage"}
    return body


def text_of(events: list[httpx_sse.ServerSentEvent]) -> str:
    return "".join(json.loads(e.data)["token"] for e in events if e.event == "message")


def ended(events: list[httpx_sse.ServerSentEvent]) -> dict[str, Any]:
    """Returns the data of the `done` event, which must be the last."""
    assert events[-1].event == "done", events[-1]
    assert all(e.event == "message" for e in events[:-1])
    return json.loads(events[-1].data)


def failed(events: list[httpx_sse.ServerSentEvent]) -> str:
    """Returns the code of the `error` event, which must be the last."""
    assert events[-1].event == "error", events[-1:]
    assert all(e.event == "message" for e in events[:-1])
    error = json.loads(events[-1].data)["error"]
    assert error["message"]
    return error["code"]
