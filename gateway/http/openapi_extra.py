"""Describes the part of the API that Litestar does not serve.

The inference path and `/mcp` are served in front of Litestar. Webhook events are requests to receivers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway import errors as e
from gateway.events.catalog import SAMPLES
from gateway.http.operation import Schema, describe_errors, describe_response, json_body, schemas
from gateway.inference.formats.native import Prompt
from gateway.inference.formats.openai import Completion

# -- inference -----------------------------------------------------------------------------------------------


class TokenUsage(msgspec.Struct):
    inputTokens: int
    outputTokens: int


class PromptResponse(msgspec.Struct):
    """The completion of a prompt, if it is not streamed."""

    text: str
    model: str
    finishReason: Literal["stop", "length", "content_filter"]
    usage: TokenUsage | None  # null when the provider reported none


class Model(msgspec.Struct):
    """A model in the OpenAI format."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


COMPLETION_ERRORS = (
    e.RequestMalformed,
    e.ModelNotAllowed,
    e.ProviderRefused,
    e.TokenMissing,
    e.TokenInvalid,
    e.SpendCapReached,
    e.AppCapReached,
    e.UserCapReached,
    e.OriginNotAllowed,
    e.AppNotFound,
    e.RequestTooLarge,
    e.MultimodalUnsupported,
    e.TokensLimited,
    e.AppRateLimited,
    e.UserRateLimited,
    e.ProviderUnreachable,
    e.ProviderFailed,
    e.InferenceDisabled,
    e.AppBackendUnreachable,
    e.ProviderQuotaExhausted,
    e.BackboneUnavailable,
    e.ProviderTimeout,
)
MODELS_ERRORS = (
    e.TokenMissing,
    e.TokenInvalid,
    e.OriginNotAllowed,
    e.AppNotFound,
    e.TokensLimited,
    e.InferenceDisabled,
    e.AppBackendUnreachable,
    e.BackboneUnavailable,
)

PROMPT_EXAMPLE = {"prompt": "What is a capsule?", "stream": True}
RESPONSE_EXAMPLE = {
    "text": "An app and its backend in one.",
    "model": "gpt-oss-120b",
    "finishReason": "stop",
    "usage": {"inputTokens": 5, "outputTokens": 8},
}
STREAM_EXAMPLE = """\
data: {"token":"Hello"}

data: {"token":" there"}

event: done
data: {"model":"gpt-oss-120b","finishReason":"stop","usage":{"inputTokens":5,"outputTokens":2}}

"""
COMPLETION_EXAMPLE = {
    "model": "gpt-oss-120b",
    "messages": [{"role": "user", "content": "What is a capsule?"}],
    "stream": True,
}
CHUNKS_EXAMPLE = """\
data: {"id":"chatcmpl-…","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"Hello"}}]}

data: [DONE]

"""
STREAMED_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"enum": ["message", "done", "error"]}, "data": {"type": "string"}},
}


BROWSER_NOTE = (
    "In a browser, only the app's own pages may call this: “Try it out” on this page gets 403 `ORIGIN_NOT_ALLOWED`. "
    "Calls without an `Origin` header, such as those of curl, are accepted."
)


def _inference_operation(path: str, summary: str, answer: Any, errors: tuple[type[e.ServiceError], ...]) -> Schema:
    return {
        "operationId": path.replace("/", "-"),
        "summary": summary,
        "description": BROWSER_NOTE,
        "tags": ["Inference"],
        "security": [{"userToken": []}],
        "parameters": [_path_parameter("app", "The app's name")],
        "responses": {"200": describe_response(answer), **describe_errors(errors, "")},
    }


def _path_parameter(name: str, description: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "description": description}


def inference_paths() -> Schema:
    native = _inference_operation("ai", "Ask the model", PromptResponse, COMPLETION_ERRORS)
    native["requestBody"] = json_body(Prompt, PROMPT_EXAMPLE)
    content = native["responses"]["200"]["content"]
    content["application/json"]["example"] = RESPONSE_EXAMPLE
    content["text/event-stream"] = {"schema": STREAMED_EVENT, "example": STREAM_EXAMPLE}

    openai = _inference_operation(
        "ai/chat/completions", "Ask the model, in the OpenAI format", dict[str, Any], COMPLETION_ERRORS
    )
    openai["requestBody"] = json_body(Completion, COMPLETION_EXAMPLE)
    openai["responses"]["200"]["content"]["text/event-stream"] = {"schema": STREAMED_EVENT, "example": CHUNKS_EXAMPLE}

    model = _inference_operation("ai/models/model", "Get a model", Model, (*MODELS_ERRORS, e.NotFound))
    model["parameters"] = [*model["parameters"], _path_parameter("model", "The model's id")]
    return {
        "/capsule/{app}/ai": {"post": native},
        "/capsule/{app}/ai/chat/completions": {"post": openai},
        "/capsule/{app}/ai/models": {
            "get": _inference_operation("ai/models", "List the models", Models, MODELS_ERRORS)
        },
        "/capsule/{app}/ai/models/{model}": {"get": model},
    }


# -- agents --------------------------------------------------------------------------------------------------


def agents_path() -> Schema:
    operation = {
        "operationId": "mcp",
        "summary": "Call an agent tool",
        "description": "Model Context Protocol over streamable HTTP. The tools are `service_app`, `service_delivery`, "
        "`service_deploy`, `service_env`, `service_hook`, `service_limits`, `service_logs`, `service_publish` and "
        "`service_usage`.",
        "tags": ["Agents"],
        "security": [{"apiKey": []}],
        "requestBody": json_body(dict[str, Any], {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}),
        "responses": {
            "200": describe_response(dict[str, Any]),
            **describe_errors((e.Unauthorized, e.BackboneUnavailable), ""),
        },
    }
    return {"/mcp": {"post": operation}}


# -- events --------------------------------------------------------------------------------------------------


def webhooks() -> Schema:
    """Describes every event as a request to the account's receiver."""
    return {name: {"post": _event(name, sample)} for name, sample in SAMPLES.items()}


def _event(name: str, sample: Any) -> Schema:
    (data,), _ = schemas([type(sample)])
    envelope = {
        "type": "object",
        "required": ["type", "id", "timestamp", "data"],
        "properties": {
            "type": {"const": name},
            "id": {"type": "string"},
            "timestamp": {"type": "integer", "description": "Milliseconds since the Unix epoch"},
            "data": data,
        },
    }
    example = {"type": name, "id": "evt_…", "timestamp": 1767225600000, "data": msgspec.to_builtins(sample)}
    return {
        "summary": name,
        "tags": ["Events"],
        "parameters": [
            {"name": f"X-Service-{header}", "in": "header", "required": True, "schema": {"type": "string"}}
            for header in ("Event", "Delivery", "Timestamp", "Signature")
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": envelope, "example": example}}},
        "responses": {
            "2XX": {"description": "Delivered. Any other status is a failure. Failed deliveries are not retried."}
        },
    }


TYPES = [PromptResponse, Model, Models, Prompt, Completion, *map(type, SAMPLES.values())]
