"""Serves the API reference and the OpenAPI 3.1 document of the service, and the schema of manifests.

The document is built from the handlers' declarations: the return annotation, the summary or the docstring's first line,
the media type, tags, security, and our own options `errors`, `body` and `body_required`. Litestar adds the parameters.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from inspect import cleandoc
from typing import Any, Literal

import msgspec
from litestar import Litestar, Request, Response, Router, get
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, OpenAPIRenderPlugin
from litestar.routes import HTTPRoute

from gateway import errors as e
from gateway.accounts.access import CALLS, TOOL_CALLS
from gateway.accounts.members import AccountChoice
from gateway.api import documentation
from gateway.api.assets import HEADERS, NO_CACHE
from gateway.deploys.manifest import manifest_schema
from gateway.events.catalog import SAMPLES
from gateway.inference.formats.endpoints import ENDPOINTS
from gateway.inference.formats.native import Prompt
from gateway.inference.formats.openai import Completion
from gateway.inference.formats.responses import ResponseRequest
from gateway.services import Injected
from gateway.settings import Settings
from gateway.settings.prices import PRICES, choice_of

SCHEMA = "application/schema+json"
REASON = {
    "name": "X-Reason",
    "in": "header",
    "description": "Why, for the audit trail: up to 500 characters on one line, as ASCII or as percent-encoded UTF-8",
    "schema": {"type": "string", "minLength": 1},
}
OPTIONAL = {"/dashboard/sign-in", "/dashboard/callback"}  # addresses that exist only with an OpenID provider
UNSAFE_METHODS, COOKIES = {"POST", "PUT", "PATCH", "DELETE"}, {"session", "ops"}

DESCRIPTION = """\
Managed inference for apps, signed event webhooks, and deploy hooks. Times are ISO 8601 UTC with milliseconds; money is
in whole nano-euro (1 EUR is 1,000,000,000). Every response has `X-Request-Id`. Error messages say what to do next:
`{"error": {"code", "message", "requestId"}}`, with `Retry-After` if a retry can succeed."""

SECURITY = {
    "apiKey": {"type": "http", "scheme": "bearer", "description": "An account's API key, `csk_…`"},
    "operatorToken": {"type": "http", "scheme": "bearer", "description": "`GATEWAY_OPERATOR_TOKEN`"},
    "userToken": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "JWT",
        "description": "Issued by the app's own backend",
    },
    "session": {"type": "apiKey", "in": "cookie", "name": "capsule_session", "description": "The dashboard's session"},
    "ops": {"type": "apiKey", "in": "cookie", "name": "capsule_operator", "description": "The operators' session"},
}


# -- declarations of handlers ---------------------------------------------------------------------------------


def response_type(handler: HTTPRouteHandler) -> Any:
    """Returns the type of the handler's JSON response, or None for a response that is empty or not JSON."""
    if media_type(handler) != JSON:
        return None
    annotation = handler.parsed_fn_signature.return_type
    if annotation.is_subclass_of(Response):
        annotation = annotation.inner_types[0]
    return None if annotation.is_none_type else annotation.annotation


def body_type(handler: HTTPRouteHandler) -> Any:
    field = handler.parsed_fn_signature.parameters.get("data")
    return None if field is None else field.annotation


def media_type(handler: HTTPRouteHandler) -> str:
    declared = getattr(handler.media_type, "value", handler.media_type)  # empty for an empty response
    return str(declared).partition(";")[0] or JSON


def errors_of(handler: HTTPRouteHandler, method: str, path: str) -> list[type[e.ServiceError]]:
    """Returns the errors that follow from the handler's security and its row in CALLS, and those that it declares."""
    kinds = {kind for choice in handler.resolve_security() for kind in choice}
    errors: list[type[e.ServiceError]] = [e.Unauthorized, e.BackboneUnavailable] if kinds else []
    if method in UNSAFE_METHODS and kinds & COOKIES:
        errors.append(e.CsrfRefused)
    if "apiKey" in kinds:  # the key's scope, and the account's pacing
        errors += [e.NotPermitted, e.RateLimited]
    if kinds == {"apiKey", "session"}:  # a person may belong to several accounts
        errors.append(e.AccountNotChosen)
    if (call := CALLS.get(f"{method} {path}")) and call.stops_with_deletion:
        errors.append(e.AppSuspended)
    if takes_reason(handler, method):
        errors.append(e.RequestMalformed)
    return list(dict.fromkeys([*errors, *handler.opt.get("errors", ())]))


def takes_reason(handler: HTTPRouteHandler, method: str) -> bool:
    """Returns whether operators can say why they make the change."""
    return method in UNSAFE_METHODS and any("operatorToken" in choice for choice in handler.resolve_security())


def describe(handler: HTTPRouteHandler, operation: Schema, method: str, path: str) -> None:
    """Completes Litestar's description of an operation."""
    summary, _, description = cleandoc(handler.fn.__doc__ or "").partition("\n\n")
    operation["summary"] = handler.summary or summary.removesuffix(".")
    operation.pop("description", None)
    if description:
        operation["description"] = description
    status = next(code for code in operation["responses"] if code.startswith("2"))
    operation["responses"] = {
        status: describe_response(response_type(handler), media_type(handler)),
        **describe_errors(errors_of(handler, method, path), path),
    }
    if takes_reason(handler, method):
        operation["parameters"] = [*operation.get("parameters", []), REASON]
    if body := handler.opt.get("body"):
        operation["requestBody"] = describe_body(body, required=handler.opt.get("body_required", True))
    elif body_type(handler) is not None:
        operation["requestBody"] = json_body(body_type(handler))


# -- the document --------------------------------------------------------------------------------------------


def build(app: Litestar) -> Schema:
    handlers = {
        (route.path_format, method): handler
        for route in app.routes
        if isinstance(route, HTTPRoute)
        for handler in route.route_handlers
        for method in handler.http_methods
    }
    document = app.openapi_schema.to_schema()
    types: list[Any] = [Error, *TYPES]
    for path, item in document["paths"].items():
        item.pop("head", None)  # answers as GET does
        for method, operation in item.items():
            handler = handlers[path, method.upper()]
            describe(handler, operation, method.upper(), path)
            types += [body_type(handler), response_type(handler)]
    return {
        **document,
        "paths": {**inference_paths(), **document["paths"], **agents_path()},
        "webhooks": webhooks(),
        "components": {"schemas": schemas([kind for kind in types if kind])[1], "securitySchemes": SECURITY},
    }


# -- routes ----------------------------------------------------------------------------------------


class Index(OpenAPIRenderPlugin):
    """Makes a route at the address of Litestar's router, which needs one. `answer_index` answers for it."""

    def __init__(self) -> None:
        super().__init__(path="/")

    def render(self, request: Request[Any, Any, Any], openapi_schema: Schema) -> bytes:
        raise NotImplementedError


async def answer_index(request: Request[Any, Any, State]) -> Response[bytes] | None:
    """Answers with the documentation's first page, with an ETag as all pages have. Returns None for other addresses."""
    if request.url.path.rstrip("/") != "/docs":
        return None
    return await documentation.send_page(request, "/docs", request.app.state.base_url)


class ApiDocument(JsonRenderPlugin):
    def __init__(self) -> None:
        super().__init__(media_type="application/json")  # type: ignore[arg-type]
        self._rendered = b""

    def render(self, request: Request[Any, Any, Any], openapi_schema: Schema) -> bytes:
        self._rendered = self._rendered or msgspec.json.encode(build(request.app))
        return self._rendered


document = ApiDocument()


@get("/reference", include_in_schema=False)
async def reference_page(request: Request[Any, Any, State], settings: Injected[Settings]) -> Response[bytes]:
    schema = document.render(request, {})
    return await documentation.send_page(request, "/docs/reference", settings.base_url, schema)


@get("/capsule.schema.json", media_type=SCHEMA, sync_to_thread=False, include_in_schema=False)
def schema_of_manifest() -> bytes:
    return msgspec.json.encode(manifest_schema())


def config() -> OpenAPIConfig:
    return OpenAPIConfig(
        title="Capsule Services",
        version=importlib.metadata.version("capsule-gateway"),
        description=DESCRIPTION,
        render_plugins=[Index(), document],
        openapi_router=Router(
            "/docs",
            route_handlers=[reference_page, schema_of_manifest],
            response_headers={**HEADERS, "cache-control": NO_CACHE},
            before_request=answer_index,
            include_in_schema=False,
        ),
    )


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
    e.AppSuspended,
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
    e.AppSuspended,
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
ASKED_EXAMPLE = {"model": "gpt-oss-120b", "input": "What is a capsule?", "stream": True}
EVENTS_EXAMPLE = """\
event: response.created
data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_…","object":"response","output":[]}}

event: response.output_text.delta
data: {"type":"response.output_text.delta","sequence_number":4,"item_id":"msg_…","output_index":0,"delta":"Hello"}

event: response.completed
data: {"type":"response.completed","sequence_number":8,"response":{"id":"resp_…","object":"response","output":[]}}

"""
# What each address takes and answers: its summary, its body with an example, its answer, and a stream.
ASKED: dict[str, tuple[str, Any, Any, Any, str]] = {
    "ai": ("Ask the model", Prompt, PROMPT_EXAMPLE, PromptResponse, STREAM_EXAMPLE),
    "ai/chat/completions": (
        "Ask the model, in OpenAI's chat-completions format",
        Completion,
        COMPLETION_EXAMPLE,
        dict[str, Any],
        CHUNKS_EXAMPLE,
    ),
    "ai/responses": (
        "Ask the model, in OpenAI's Responses format",
        ResponseRequest,
        ASKED_EXAMPLE,
        dict[str, Any],
        EVENTS_EXAMPLE,
    ),
}
STREAMED_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
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
    endpoints = {}
    for path in ENDPOINTS:
        summary, body, example, answer, streamed = ASKED[path]
        operation = _inference_operation(path, summary, answer, COMPLETION_ERRORS)
        operation["requestBody"] = json_body(body, example)
        content = operation["responses"]["200"]["content"]
        content["text/event-stream"] = {"schema": STREAMED_EVENT, "example": streamed}
        endpoints[f"/capsule/{{app}}/{path}"] = {"post": operation}
        if path == "ai":
            content["application/json"]["example"] = RESPONSE_EXAMPLE

    model = _inference_operation("ai/models/model", "Get a model", Model, (*MODELS_ERRORS, e.NotFound))
    model["parameters"] = [*model["parameters"], _path_parameter("model", "The model's id")]
    return {
        **endpoints,
        "/capsule/{app}/ai/models": {
            "get": _inference_operation("ai/models", "List the models", Models, MODELS_ERRORS)
        },
        "/capsule/{app}/ai/models/{model}": {"get": model},
    }


# -- agents --------------------------------------------------------------------------------------------------


def agents_path() -> Schema:
    *others, last = sorted({f"`{action.partition(' ')[0]}`" for action in TOOL_CALLS})
    operation = {
        "operationId": "mcp",
        "summary": "Call an agent tool",
        "description": f"Model Context Protocol over streamable HTTP. The tools are {', '.join(others)} and {last}.",
        "tags": ["Agents"],
        "security": [{"apiKey": []}],
        "requestBody": json_body(dict[str, Any], {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}),
        "responses": {
            "200": describe_response(dict[str, Any]),
            **describe_errors((e.Unauthorized, e.NotPermitted, e.RateLimited, e.BackboneUnavailable), ""),
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


TYPES = [PromptResponse, Model, Models, Prompt, Completion, ResponseRequest, *map(type, SAMPLES.values())]


Schema = dict[str, Any]
Errors = Sequence[type[e.ServiceError]]
JSON = "application/json"

# Example messages of the errors whose message depends on the request.
MESSAGES: dict[type[e.ServiceError], str] = {
    e.RequestMalformed: "name: must be text, not a whole number.",
    e.ModelNotAllowed: choice_of(PRICES),
}


class ErrorDetail(msgspec.Struct):
    code: str
    message: str  # says what to do next
    requestId: str
    accounts: list[AccountChoice] | msgspec.UnsetType = msgspec.UNSET  # with ACCOUNT_NOT_CHOSEN: those of the person


class Error(msgspec.Struct):
    error: ErrorDetail


def schemas(types: Sequence[Any]) -> tuple[tuple[Schema, ...], Schema]:
    """Returns a schema for each type, and the components to which they refer."""
    return msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")


def describe_response(body: Any, media_type: str = JSON) -> Schema:
    """Describes a response with status 2xx. `body` is the type of its JSON, or None."""
    if media_type != JSON:
        schema = {"type": "object"} if media_type == "text/event-stream" else {"type": "string"}
        return {"description": "Done", "content": {media_type: {"schema": schema}}}
    if body is None:
        return {"description": "Done"}
    (schema,), _ = schemas([body])
    return {"description": "Done", "content": {JSON: {"schema": schema}}}


def describe_errors(errors: Errors, path: str) -> Schema:
    """Returns the description of the error responses by status."""
    responses: Schema = {}
    for status in sorted({error.status for error in errors}):
        responses[str(status)] = _describe_status([error for error in errors if error.status == status])
    if ("{" in path or path in OPTIONAL) and "404" not in responses:
        responses["404"] = {
            "description": "No such address",
            "content": {"text/plain": {"example": "Not Found"}},
        }
    return responses


def _describe_status(errors: Errors) -> Schema:
    examples = {
        error.code: {
            "value": {
                "error": {
                    "code": error.code,
                    "message": MESSAGES.get(error, error.message),
                    "requestId": "2b8a6f…",
                }
            }
        }
        for error in errors
    }
    response: Schema = {"description": " or ".join(f"`{code}`" for code in examples)}
    if errors[0].status in (402, 429, 502, 503):
        response["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
    content = {"schema": {"$ref": "#/components/schemas/Error"}, "examples": examples}
    return {**response, "content": {JSON: content}}


def describe_body(content: Schema, *, required: bool = True) -> Schema:
    """Describes a request body. `content` maps media types to a schema and an example."""
    return {"required": required, "content": content}


def json_body(body: Any, example: Any = None) -> Schema:
    """Describes a request body of JSON. `body` is its type."""
    (schema,), _ = schemas([body])
    return describe_body({JSON: {"schema": schema} if example is None else {"schema": schema, "example": example}})
