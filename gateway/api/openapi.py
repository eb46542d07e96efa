"""The API's description, OpenAPI 3.1, at /docs and /docs/openapi.json.

Litestar knows the routes, their parameters and bodies. What they answer and how they fail is told in one table here;
the token path, which is in front of Litestar, and the events that receivers get are added.
"""

from __future__ import annotations

import importlib.metadata
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
from litestar import Request, Response, Router, get
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, OpenAPIRenderPlugin
from litestar.params import FromPath

from gateway import errors as e
from gateway.api import account, operators, ops, pages
from gateway.api import answers as a
from gateway.api.pages import HEADERS, PAGES, page_file
from gateway.events import catalogue
from gateway.inference.native import Prompt
from gateway.inference.openai import Completion
from gateway.monitors.findings import Counts

SURFACE_MODULES = (account, operators, pages, ops)
REFERENCE = PAGES / "docs"
Schema = dict[str, Any]
Errors = tuple[type[e.ServiceError], ...]


class Told(NamedTuple):
    summary: str
    answer: Any = None  # a type; a media type for what is not JSON; None for an empty answer
    errors: Errors = ()


BAD, GONE = e.RequestMalformed, e.NotFound
QUEUE: Errors = (e.DeployQuotaReached,)

# What every route of a surface may answer with besides. A session's cookie is an account's or an operator's key too.
SURFACES: dict[str, tuple[str, Errors, list[dict[str, list[str]]]]] = {
    "/account": ("Account", (e.Unauthorized, e.BackboneUnavailable), [{"apiKey": []}, {"session": []}]),
    "/capabilities": ("Account", (e.Unauthorized, e.BackboneUnavailable), [{"apiKey": []}, {"operatorToken": []}]),
    "/platform": ("Platform", (e.Unauthorized, e.BackboneUnavailable), [{"operatorToken": []}, {"ops": []}]),
    "/ops/events": ("Pages", (e.Unauthorized, e.BackboneUnavailable), [{"operatorToken": []}, {"ops": []}]),
    "/capsule": ("Inference", (), [{"userToken": []}]),
    "/hooks": ("Deploy hooks", (e.BackboneUnavailable,), []),
    "/register": ("Account", (e.BackboneUnavailable,), []),
    "/mcp": ("Agents", (e.Unauthorized, e.BackboneUnavailable), [{"apiKey": []}]),
    "/health": ("Operation", (), []),
    "/ready": ("Operation", (e.BackboneUnavailable,), []),
    "/metrics": ("Operation", (), []),
    "/": ("Pages", (), []),
}
CHANGES, SESSIONS = {"post", "put", "patch", "delete"}, {"session", "ops"}

LOG_IN: Errors = (BAD, e.Unauthorized, e.CsrfRefused, e.LoginsLimited, e.BackboneUnavailable)
HTML, FILE = "text/html", "application/octet-stream"

OPERATIONS: dict[str, Told] = {
    "GET /capabilities": Told("What the service can do now", a.Capabilities),
    "GET /account": Told("The account, its limits, and what it spent today", a.Account),
    "GET /account/usage": Told("Requests and tokens of the last 24 hours", list[a.Hour]),
    "GET /account/apps": Told("Its apps, with their health", list[a.App]),
    "GET /account/webhook": Told("Where its events go", a.Receiver, (GONE,)),
    "PUT /account/webhook": Told("Set where its events go", a.SetReceiver, (BAD,)),
    "DELETE /account/webhook": Told("Clear it, and its secret"),
    "POST /account/webhook/test": Told("Send a sample of an event", a.Id, (BAD, GONE)),
    "GET /account/deliveries": Told("Outcomes of deliveries", list[a.Delivery], (BAD,)),
    "POST /account/deliveries/{delivery_id}/redeliver": Told("Send an event again", a.Id, (GONE,)),
    "POST /account/apps/{app}/hooks": Told("Create a deploy hook", a.CreatedHook, (BAD, GONE)),
    "GET /account/hooks": Told("Its deploy hooks", list[a.ListedHook]),
    "DELETE /account/hooks/{hook_id}": Told("Revoke a deploy hook", None, (GONE,)),
    "GET /account/deploys": Told("Its deploys", list[a.Deploy], (BAD,)),
    "GET /account/deploys/{deploy_id}": Told("One deploy, with its log", a.DeployWithLog, (GONE,)),
    "PUT /account/apps/{app}/source": Told("Publish an app", a.Queued, (BAD, GONE, e.RequestTooLarge, *QUEUE)),
    "POST /register": Told("A new account on the free plan", a.NewKey, (BAD, e.RegistrationsClosed)),
    "POST /hooks/deploy/{token}": Told(
        "Trigger a deploy", a.Triggered, (e.HookRateLimited, e.NoDeployYet, e.TarballGone, *QUEUE)
    ),
    "POST /platform/accounts": Told("Create an account", a.NewKey, (BAD,)),
    "PATCH /platform/accounts/{account_id}": Told("Change its plan", a.AccountRecord, (BAD, GONE)),
    "PUT /platform/apps/{app}": Told("Create or replace an app", a.AppRecord, (BAD,)),
    "GET /platform/apps/{app}": Told("Show an app", a.AppRecord, (GONE,)),
    "DELETE /platform/apps/{app}": Told("Delete an app", None, (GONE,)),
    "POST /platform/apps/{app}/crashes": Told("Report a crash", a.Id, (BAD, GONE)),
    "POST /platform/apps/{app}/findings": Told("Report a whole security scan", Counts, (BAD, GONE)),
    "PUT /platform/apps/{app}/source": Told("Publish an app", a.Queued, (BAD, GONE, e.RequestTooLarge, *QUEUE)),
    "DELETE /platform/apps/{app}/source": Told("Clean up its stored source", None, (GONE,)),
    "POST /platform/apps/{app}/deploys": Told(
        "Queue a deploy", a.Queued, (BAD, GONE, e.NoDeployYet, e.TarballGone, *QUEUE)
    ),
    "GET /platform/deploys": Told("The deploys that wait", list[a.QueuedDeploy], (BAD,)),
    "GET /platform/deploys/{deploy_id}/source": Told("The stored source of one", "application/gzip", (GONE,)),
    "POST /platform/deploys/{deploy_id}/phases": Told("Report a phase of one", a.Deploy, (BAD, GONE)),
    "GET /platform/inference": Told("The switch, the approval, the status", a.Inference),
    "PUT /platform/inference": Told("Set them", a.Inference, (BAD,)),
    "GET /health": Told("The process answers", a.Status),
    "GET /ready": Told("Redis is reachable and the process is not draining", a.Status),
    "GET /metrics": Told("For Prometheus", "text/plain"),
    "GET /": Told("The public page", HTML),
    "GET /pages/{file}": Told("A file of the pages", FILE),
    "GET /dashboard": Told("The account's dashboard", HTML),
    "GET /dashboard/{file}": Told("A file of it", FILE),
    "POST /dashboard/session": Told("Log in with an API key", None, LOG_IN),
    "DELETE /dashboard/session": Told("Log out", None, (e.CsrfRefused, e.BackboneUnavailable)),
    "GET /ops": Told("The operators' page", HTML),
    "GET /ops/{file}": Told("A file of it", FILE),
    "GET /ops/events": Told("Its figures, every two seconds", "text/event-stream", (e.ViewersLimited,)),
    "POST /ops/session": Told("Log in with the operator token", None, LOG_IN),
    "DELETE /ops/session": Told("Log out", None, (e.CsrfRefused, e.BackboneUnavailable)),
}

ASKING: Errors = (
    e.RequestMalformed,
    e.ModelNotAllowed,
    e.TokenMissing,
    e.TokenInvalid,
    e.SpendCapReached,
    e.OriginNotAllowed,
    e.AppNotFound,
    e.RequestTooLarge,
    e.MultimodalUnsupported,
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
KNOWING: Errors = tuple(
    error
    for error in ASKING
    if error.status in (401, 403, 404) or error in (e.InferenceDisabled, e.AppBackendUnreachable, e.BackboneUnavailable)
)

STREAM = """\
data: {"token":"Hello"}

data: {"token":" there"}

event: done
data: {"model":"gpt-oss-120b","finishReason":"stop","usage":{"inputTokens":5,"outputTokens":2}}

"""
CHUNKS = """\
data: {"id":"chatcmpl-…","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"Hello"}}]}

data: [DONE]

"""
EVENT = {  # of a stream, each
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"enum": ["message", "done", "error"]}, "data": {"type": "string"}},
}
QUESTION = {"prompt": "What is a capsule?", "stream": True}
MESSAGES = {"model": "gpt-oss-120b", "messages": [{"role": "user", "content": "What is a capsule?"}], "stream": True}
ANSWERED = {
    "text": "An app and its backend in one.",
    "model": "gpt-oss-120b",
    "finishReason": "stop",
    "usage": {"inputTokens": 5, "outputTokens": 8},
}

SAID: dict[type[e.ServiceError], str] = {  # where each case has its own words
    e.RequestMalformed: "name: Expected `str`, got `int`.",
    e.ModelNotAllowed: "model: choose one of gpt-oss-120b, qwen3.6-35b-a3b, llama-3.3-70b-instruct.",
}
FINDINGS = {
    "findings": [
        {"cve": "CVE-2026-0001", "component": "example@1.0.0", "severity": "critical", "fixedIn": "1.0.1"},
    ]
}

DESCRIPTION = """\
Managed inference for apps, signed event webhooks, and deploy hooks. Times are ISO 8601 UTC with milliseconds; money is
in whole nano-euro (1 EUR is 1,000,000,000). Every answer carries `X-Request-Id`. Errors say what to do next:
`{"error": {"code", "message", "requestId"}}`, with `Retry-After` wherever waiting helps."""

SECURITY = {
    "apiKey": {"type": "http", "scheme": "bearer", "description": "An account's API key, `csk_…`"},
    "operatorToken": {"type": "http", "scheme": "bearer", "description": "`GATEWAY_OPERATOR_TOKEN`"},
    "userToken": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT", "description": "Of the app's own backend"},
    "session": {"type": "apiKey", "in": "cookie", "name": "capsule_session", "description": "The dashboard's"},
    "ops": {"type": "apiKey", "in": "cookie", "name": "capsule_operator", "description": "The operators' page's"},
}


# -- one operation -------------------------------------------------------------------------------------------


def _surface(path: str) -> tuple[str, Errors, list[dict[str, list[str]]]]:
    return next(told for prefix, told in SURFACES.items() if path.startswith(prefix))


def _finish(operation: Schema, method: str, path: str, told: Told, status: str) -> None:
    tag, errors, security = _surface(path)
    errors = (*errors, *told.errors)
    if method in CHANGES and any(kind in SESSIONS for choice in security for kind in choice):
        errors = (*errors, e.CsrfRefused)
    operation |= {"summary": told.summary, "tags": [tag]}
    if security:
        operation["security"] = security
    found: Schema = {status: _answer(told.answer)}
    for code in sorted({error.status for error in errors}):
        found[str(code)] = _refusal([error for error in errors if error.status == code])
    if "{" in path and "404" not in found:
        found["404"] = {"description": "There is no such address", "content": {"text/plain": {"example": "Not Found"}}}
    operation["responses"] = found


def _answer(answer: Any) -> Schema:
    if answer is None:
        return {"description": "Done"}
    if isinstance(answer, str):
        schema = {"type": "object"} if answer == "text/event-stream" else {"type": "string"}
        return {"description": "Done", "content": {answer: {"schema": schema}}}
    (schema,), _ = _schemas([answer])
    return {"description": "Done", "content": {"application/json": {"schema": schema}}}


def _refusal(errors: list[type[e.ServiceError]]) -> Schema:
    codes = list(dict.fromkeys(error.code for error in errors))
    examples = {
        error.code: {"value": {"error": {"code": error.code, "message": message, "requestId": "2b8a6f…"}}}
        for error in errors
        for message in [SAID.get(error, error.message)]
    }
    content: Schema = {"schema": {"$ref": "#/components/schemas/Error"}, "examples": examples}
    refusal: Schema = {"description": " or ".join(f"`{code}`" for code in codes)}
    if errors[0].status in (429, 503):
        refusal["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
    return {**refusal, "content": {"application/json": content}}


def _schemas(types: list[Any]) -> tuple[tuple[Schema, ...], Schema]:
    return msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")


def _body(schema: Schema, example: Any = None, media: str = "application/json") -> Schema:
    examples = {} if example is None else {"example": example}
    return {"required": True, "content": {media: {"schema": schema, **examples}}}


# -- what Litestar does not know -----------------------------------------------------------------------------


def _token_path() -> Schema:
    app = {"name": "app", "in": "path", "required": True, "schema": {"type": "string"}, "description": "Its name"}
    (prompt, completion), _ = _schemas([Prompt, Completion])
    told = {
        "ai": ("post", Told("Ask the model", a.Answer, ASKING), _body(prompt, QUESTION), STREAM, ANSWERED),
        "ai/chat/completions": (
            "post",
            Told("Ask in the OpenAI format", dict[str, Any], ASKING),
            _body(completion, MESSAGES),
            CHUNKS,
            None,
        ),
        "ai/models": ("get", Told("The models that may be asked", a.Models, KNOWING), None, None, None),
    }
    paths: Schema = {}
    for rest, (method, operation_told, body, stream, whole) in told.items():
        path = f"/capsule/{{app}}/{rest}"
        operation: Schema = {"operationId": rest.replace("/", "-"), "parameters": [app]}
        if body is not None:
            operation["requestBody"] = body
        _finish(operation, method, path, operation_told, "200")
        content = operation["responses"]["200"]["content"]
        if whole is not None:
            content["application/json"]["example"] = whole
        if stream is not None:
            content["text/event-stream"] = {"schema": EVENT, "example": stream}
        paths[path] = {method: operation}
    return paths


def _agents() -> Schema:
    operation: Schema = {
        "operationId": "mcp",
        "description": "Model Context Protocol over streamable HTTP: the tool `service_hook`.",
        "requestBody": _body({"type": "object"}, {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}),
    }
    _finish(operation, "post", "/mcp", Told("The agent tool", dict[str, Any]), "200")
    return {"/mcp": {"post": operation}}


def _webhooks() -> Schema:
    found = {}
    for name, sample in catalogue.SAMPLES.items():
        (data,), _ = _schemas([type(sample)])
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
        headers = [
            {"name": f"X-Service-{header}", "in": "header", "required": True, "schema": {"type": "string"}}
            for header in ("Event", "Delivery", "Timestamp", "Signature")
        ]
        example = {"type": name, "id": "evt_…", "timestamp": 1767225600000, "data": msgspec.to_builtins(sample)}
        operation = {
            "summary": name,
            "tags": ["Events"],
            "parameters": headers,
            "requestBody": _body(envelope, example),
            "responses": {"2XX": {"description": "Delivered; anything else is a failure, and is not tried again"}},
        }
        found[name] = {"post": operation}
    return found


# -- the whole -----------------------------------------------------------------------------------------------


def _is_body(kind: object, module: ModuleType) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__


def complete(schema: Schema) -> Schema:
    """What Litestar knows, with the rest."""
    answers = [told.answer for told in OPERATIONS.values()]
    types = [answer for answer in answers if not isinstance(answer, str | None)]
    samples = [type(sample) for sample in catalogue.SAMPLES.values()]
    # Litestar leaves out which of the bodies take no unknown fields; msgspec does not.
    bodies = [kind for module in SURFACE_MODULES for kind in vars(module).values() if _is_body(kind, module)]
    _, components = _schemas([*types, *samples, *bodies, a.Error, a.Answer, a.Models, Prompt, Completion])
    paths = {}
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            told = OPERATIONS[f"{method.upper()} {path}"]
            status = next(code for code in operation["responses"] if code.startswith("2"))
            _finish(operation, method, path, told, status)
            if path.endswith("/source") and method == "put":
                operation["requestBody"] = _body(
                    {"type": "string", "format": "binary"}, media="application/octet-stream"
                )
            if path.endswith("/findings"):
                operation["requestBody"] = _body({"type": "object"}, FINDINGS)
        paths[path] = item
    return {
        **schema,
        "paths": {**_token_path(), **paths, **_agents()},
        "webhooks": _webhooks(),
        "components": {"schemas": components, "securitySchemes": SECURITY},
    }


class _Page(OpenAPIRenderPlugin):
    def __init__(self) -> None:
        super().__init__(path="/")

    def render(self, request: Request[Any, Any, Any], openapi_schema: Schema) -> bytes:
        return (REFERENCE / "index.html").read_bytes()


class _Description(JsonRenderPlugin):
    def __init__(self) -> None:
        super().__init__(media_type="application/json")  # type: ignore[arg-type]
        self._rendered = b""

    def render(self, request: Request[Any, Any, Any], openapi_schema: Schema) -> bytes:
        if not self._rendered:
            self._rendered = msgspec.json.encode(complete(openapi_schema))
        return self._rendered


@get("/files/{file:str}", sync_to_thread=False, include_in_schema=False)
def reference_file(file: FromPath[str]) -> Response[bytes]:
    return page_file(REFERENCE, file)


def config() -> OpenAPIConfig:
    return OpenAPIConfig(
        title="Capsule Gateway",
        version=importlib.metadata.version("capsule-gateway"),
        description=DESCRIPTION,
        use_handler_docstrings=True,
        render_plugins=[_Page(), _Description()],
        openapi_router=Router(
            "/docs", route_handlers=[reference_file], response_headers=HEADERS, include_in_schema=False
        ),
    )
