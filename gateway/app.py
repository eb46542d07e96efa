"""The ASGI application: the token path first, Litestar behind it.

`gateway.app:app` is the application for any ASGI server; `create_app` makes one of given settings.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import structlog
from litestar import Litestar, Request, Response, get
from litestar.datastructures import State
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.routes import HTTPRoute
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway import log
from gateway.api import account, openapi, operators, ops, pages
from gateway.api.agents import AgentEndpoint
from gateway.api.bodies import Body
from gateway.errors import BackboneUnavailable, MethodNotAllowed, RequestMalformed, ServiceError, Unauthorized
from gateway.ids import request_id as new_request_id
from gateway.inference.handler import NOT_FOUND, NOT_FOUND_HEADERS
from gateway.process import Gateway, Injected
from gateway.settings import BadSettings, Settings, load
from gateway.store.client import backbone

logger = structlog.get_logger()

BODY_LIMIT = 1_048_576  # bytes of a body outside the token path


@get("/health", sync_to_thread=False, include_in_schema=True)
def health() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@get("/ready")
async def ready(gateway: Injected) -> Response[dict[str, str]]:
    """Redis is reachable, and the process is not draining."""
    if gateway.draining:
        raise BackboneUnavailable("This process is shutting down; ask another.")
    with backbone():
        await gateway.store.client.ping()
    if not gateway.registry.live:
        raise BackboneUnavailable
    return Response({"status": "ready"})


@get("/metrics", media_type="text/plain; version=0.0.4; charset=utf-8", sync_to_thread=False)
def metrics(gateway: Injected) -> bytes:
    """For Prometheus."""
    return gateway.metrics.render()


def _render(request: Request[Any, Any, State], error: Exception) -> Response[bytes]:
    request_id = request.scope["state"].get("request_id", "")
    if isinstance(error, HTTPException) and not isinstance(error, ServiceError):
        if error.status_code == 404:
            return Response(NOT_FOUND, status_code=404, headers={k.decode(): v.decode() for k, v in NOT_FOUND_HEADERS})
        if error.status_code == 405:
            error = MethodNotAllowed(*_methods(request.app, request.scope["path"]))
        elif error.status_code in (400, 413):
            error = RequestMalformed(_fields(error))
        elif error.status_code == 401:
            error = Unauthorized()
    if isinstance(error, RecursionError):
        error = RequestMalformed("The body is nested too deeply.")
    if not isinstance(error, ServiceError):
        logger.error("request.crashed", request_id=request_id, exc_info=error)
        error = ServiceError()
    headers, body = error.render(request_id)
    return Response(
        body,
        status_code=error.status,
        media_type="application/json",
        headers={k.decode(): v.decode() for k, v in headers if k != b"content-length"},
    )


def _methods(app: Litestar, path: str) -> list[str]:
    """Litestar tells that a method is not among an address's, but not which are; asked with OPTIONS, it names one."""
    # One without parameters goes first, as in routing.
    for route in sorted(app.routes, key=lambda route: "{" in route.path_format):
        pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(route.path_format))
        if isinstance(route, HTTPRoute) and re.fullmatch(pattern, path):
            return sorted(route.methods)
    return []


def _fields(error: HTTPException) -> str:
    """Names the field; values stay out of messages."""
    extra = error.extra if isinstance(error.extra, list) else []
    named = [
        f"{'body' if e.get('key', 'data') == 'data' else e['key']}: {e.get('message')}"
        for e in extra
        if isinstance(e, dict)
    ]
    return "; ".join(named) or str(error.detail)


class Front:
    """Sends the token path to its bare handler and the rest to Litestar, and marks every answer."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._inference: ASGIApp = gateway.inference
        self._agents = AgentEndpoint(gateway)
        self._litestar = Litestar(
            [health, ready, metrics, *pages.ROUTES, *ops.ROUTES, *operators.ROUTES, *account.ROUTES],
            dependencies={"gateway": Provide(lambda: gateway, sync_to_thread=False, use_cache=True)},
            dto=Body,
            return_dto=None,
            exception_handlers={Exception: _render},
            lifespan=[gateway.running, self._agents.running],
            logging_config=None,
            openapi_config=openapi.config(),
            request_max_body_size=BODY_LIMIT,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # type: ignore[comparison-overlap]
            if scope["path"].startswith("/capsule/"):
                return await self._inference(scope, receive, send)
            request_id = new_request_id()
            scope["state"]["request_id"] = request_id

            async def marked(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                await send(message)

            if scope["path"] == "/mcp":
                return await self._agents(scope, receive, marked)
            if scope.get("method") == "OPTIONS" and (methods := _methods(self._litestar, scope["path"])):
                allow = (b"allow", ", ".join(methods).encode())
                await marked({"type": "http.response.start", "status": 204, "headers": [allow]})
                return await marked({"type": "http.response.body", "body": b"", "more_body": False})
            return await self._litestar(scope, receive, marked)
        return await self._litestar(scope, receive, send)


def create_app(settings: Settings) -> Front:
    log.configure(settings)
    return Front(Gateway(settings))


def __getattr__(name: str) -> Any:
    """`app` is made when a server asks for it, so that importing this module reads no settings."""
    if name != "app":
        raise AttributeError(name)
    try:
        made = create_app(load())
    except BadSettings as error:
        sys.exit(f"The settings are wrong:\n{error}")
    globals()["app"] = made
    return made
