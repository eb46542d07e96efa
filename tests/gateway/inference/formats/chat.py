"""Chats in the OpenAI format."""

import json
from typing import Any

import openai

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
