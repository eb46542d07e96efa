"""Chats in the OpenAI format, and bodies as a format reads them: what the provider gets, is priced, and is refused."""

import json
from types import ModuleType
from typing import Any

import openai

from gateway.errors import ServiceError
from tests.support.accounts import App

MODEL, PATH = "gpt-oss-120b", "/chat/completions"


def sdk(app: App, token: str | None = None, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=app.gateway.address + app.path, api_key=token or app.token(), **{"max_retries": 0, **options}
    )


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def json_bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def read_payload(format: ModuleType, body: bytes | dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns the provider's request, and the bytes that are priced."""
    request = format.read_completion_request(body if isinstance(body, bytes) else json.dumps(body).encode(), False)
    payload = json.loads(request.payload)
    assert (payload["model"], payload["max_tokens"]) == (request.model, request.max_tokens)
    return payload, request.text_bytes


def price(texts: str, *values: Any, messages: int = 1) -> int:
    """Returns the priced bytes of texts, of values as JSON, and of the allowance for further messages."""
    return len(texts.encode()) + sum(map(json_bytes, values)) + 16 * (messages - 1)


def refusal_of(format: ModuleType, body: bytes | dict[str, Any]) -> ServiceError | None:
    """Returns why the format refuses the body."""
    try:
        read_payload(format, body)
    except ServiceError as error:
        return error
    return None
