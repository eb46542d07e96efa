"""A stand-in for the model provider: an OpenAI-compatible server with a few fixed answers."""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, Router, get, post
from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException, NotAuthorizedException
from litestar.handlers import BaseRouteHandler
from litestar.params import JSONBody
from litestar.response import Stream

from gateway.settings.prices import PRICES

TOKEN_SECONDS = 0.03  # between two tokens
SELF = (
    "I am not a language model. I am the stand-in that “make run” starts: a small server on this machine that "
    "speaks the OpenAI format and knows a few sentences by heart. "
)
ABOUT = {
    "capsule": (
        "A capsule is an app with its backend built in, made from one template. It reaches a model through the "
        "gateway and never has a provider’s key. This answer came the same way: the gateway verified your token, "
        "checked your rate limit and the day’s budget, and reserved the highest possible price. At the end it "
        "charges what these words cost, to the billionth of a euro (€)."
    ),
    "key": (
        "This page sends you a short-lived token that the app’s own backend signed. The gateway verifies it with "
        "that backend’s public keys and calls the provider with a key that only the gateway has. So there is "
        "nothing to steal here: no secret in the page, in the build or in a variable. ✓"
    ),
    "": (
        "Everything else is real: the token check, the limits, the reservation of money, the streaming, and the "
        "cancellation when you press Stop. Set GATEWAY_PROVIDER_URL to a real provider and the same page talks "
        "to a real model, en français, auf Deutsch, 日本語で, or with a 🙂."
    ),
}


class ModelMessage(msgspec.Struct):
    role: str
    content: str


class ModelStreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    messages: list[ModelMessage]
    model: str
    stream: bool = False
    stream_options: ModelStreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


def split_tokens(text: str) -> list[str]:
    """Splits text into pieces about as long as a model's tokens: up to six letters, with the space before them."""
    return re.findall(r"\s?\S{1,6}", text)


def choose_answer(prompt: str) -> list[str]:
    """Returns the tokens of the answer whose keyword is in the prompt."""
    about = next(text for word, text in ABOUT.items() if word in prompt.lower())
    return split_tokens(SELF + about)


class ModelRequest:
    """An answer to a request, in the formats of OpenAI."""

    def __init__(self, request: ChatRequest) -> None:
        limit = request.max_completion_tokens or request.max_tokens or 2000
        tokens = choose_answer(request.messages[-1].content)
        self.tokens = tokens[:limit]
        self.finish = "stop" if len(tokens) <= limit else "length"
        self.head = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "created": int(time.time()),
            "model": request.model,
        }
        input_tokens = sum(len(split_tokens(message.content)) for message in request.messages)
        self.usage = {
            "prompt_tokens": input_tokens,
            "completion_tokens": len(self.tokens),
            "total_tokens": input_tokens + len(self.tokens),
        }

    def to_object(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(self.tokens)}
        choice = {"index": 0, "message": message, "finish_reason": self.finish}
        return {**self.head, "object": "chat.completion", "choices": [choice], "usage": self.usage}

    async def stream_events(self, include_usage: bool) -> AsyncIterator[bytes]:
        yield self._make_chunk({"role": "assistant", "content": ""})
        for token in self.tokens:
            await asyncio.sleep(TOKEN_SECONDS)
            yield self._make_chunk({"content": token})
        yield self._make_chunk({}, self.finish)
        if include_usage:
            yield _encode_event({**self.head, "object": "chat.completion.chunk", "choices": [], "usage": self.usage})
        yield b"data: [DONE]\n\n"

    def _make_chunk(self, delta: dict[str, str], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return _encode_event({**self.head, "object": "chat.completion.chunk", "choices": [choice]})


def _encode_event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@get("/v1/models", sync_to_thread=False)
def models() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": m, "object": "model", "owned_by": "stand-in"} for m in PRICES]}


@post("/v1/chat/completions", status_code=200)
async def chat(data: JSONBody[ChatRequest]) -> Response[Any] | Stream:
    if not data.messages:
        raise HTTPException("messages is empty", status_code=400)
    completion = ModelRequest(data)
    if data.stream:
        usage = data.stream_options is not None and data.stream_options.include_usage
        return Stream(
            completion.stream_events(usage), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
    await asyncio.sleep(TOKEN_SECONDS * len(completion.tokens))
    return Response(completion.to_object())


def _render_error(_: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
    body = {"error": {"message": error.detail, "type": "invalid_request_error", "code": None}}
    return Response(body, status_code=error.status_code)


def model_app(key: str, *others: Router) -> Litestar:
    """Returns the application of the stand-in, with other routes that need no key."""

    def require_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        if not secrets.compare_digest(connection.headers.get("Authorization", ""), f"Bearer {key}"):
            raise NotAuthorizedException("Incorrect API key provided")

    return Litestar(
        [Router("/", route_handlers=[models, chat], guards=[require_key]), *others],
        exception_handlers={HTTPException: _render_error},
        openapi_config=None,
        logging_config=None,
    )
