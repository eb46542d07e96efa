"""Serves the API reference and the OpenAPI 3.1 document of the service, and the schema of manifests.

The document is built from the handlers' declarations: the return annotation, the summary or the docstring's first line,
the media type, tags, security, and our own options `errors`, `body` and `body_required`. Litestar adds the parameters.
"""

from __future__ import annotations

import importlib.metadata
from inspect import cleandoc
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, Router, get
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, OpenAPIRenderPlugin
from litestar.routes import HTTPRoute

from gateway.deploys.manifest import manifest_schema
from gateway.errors import BackboneUnavailable, CsrfRefused, RateLimited, RequestMalformed, ServiceError, Unauthorized
from gateway.http import documentation, openapi_extra
from gateway.http.assets import HEADERS, NO_CACHE
from gateway.http.operation import (
    JSON,
    Error,
    Schema,
    describe_body,
    describe_errors,
    describe_response,
    json_body,
    schemas,
)
from gateway.process import Injected

SCHEMA = "application/schema+json"
REASON = {
    "name": "X-Reason",
    "in": "header",
    "description": "Why, for the audit trail: up to 500 characters on one line, as ASCII or as percent-encoded UTF-8",
    "schema": {"type": "string", "minLength": 1},
}
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


def errors_of(handler: HTTPRouteHandler, method: str) -> list[type[ServiceError]]:
    """Returns the errors that follow from the handler's security, and those that it declares."""
    kinds = {kind for choice in handler.resolve_security() for kind in choice}
    errors: list[type[ServiceError]] = [Unauthorized, BackboneUnavailable] if kinds else []
    if method in UNSAFE_METHODS and kinds & COOKIES:
        errors.append(CsrfRefused)
    if "apiKey" in kinds:  # the account's pacing
        errors.append(RateLimited)
    if takes_reason(handler, method):
        errors.append(RequestMalformed)
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
        **describe_errors(errors_of(handler, method), path),
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
    types: list[Any] = [Error, *openapi_extra.TYPES]
    for path, item in document["paths"].items():
        item.pop("head", None)  # answers as GET does
        for method, operation in item.items():
            handler = handlers[path, method.upper()]
            describe(handler, operation, method.upper(), path)
            types += [body_type(handler), response_type(handler)]
    return {
        **document,
        "paths": {**openapi_extra.inference_paths(), **document["paths"], **openapi_extra.agents_path()},
        "webhooks": openapi_extra.webhooks(),
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


class Document(JsonRenderPlugin):
    def __init__(self) -> None:
        super().__init__(media_type="application/json")  # type: ignore[arg-type]
        self._rendered = b""

    def render(self, request: Request[Any, Any, Any], openapi_schema: Schema) -> bytes:
        self._rendered = self._rendered or msgspec.json.encode(build(request.app))
        return self._rendered


document = Document()


@get("/reference", include_in_schema=False)
async def reference_page(request: Request[Any, Any, State], gateway: Injected) -> Response[bytes]:
    schema = document.render(request, {})
    return await documentation.send_page(request, "/docs/reference", gateway.settings.base_url, schema)


@get("/capsule.schema.json", media_type=SCHEMA, sync_to_thread=False, include_in_schema=False)
def schema_of_manifest() -> bytes:
    return msgspec.json.encode(manifest_schema())


def config() -> OpenAPIConfig:
    return OpenAPIConfig(
        title="Capsule Gateway",
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
