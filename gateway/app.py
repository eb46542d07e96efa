"""The ASGI application: the inference path first, Litestar behind it.

`create_app` is the factory for any ASGI server: `uvicorn --factory capsule_gateway:create_app`.
"""

import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import structlog
from litestar import Litestar, Request, Response, get
from litestar.datastructures import State
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.params import ParameterKwarg
from litestar.routes import HTTPRoute
from litestar.types import ASGIApp, ControllerRouterHandler, Message, Receive, Scope, Send

from gateway import log
from gateway.accounts.pacing import RequestMeter, leave_lane
from gateway.accounts.registry import Registry
from gateway.api import (
    account,
    apps,
    data,
    deploys,
    documentation,
    events,
    install,
    members,
    notices,
    openapi,
    pages,
    platform,
    reporting,
    sign_in,
    tls,
    usage,
)
from gateway.api.audit import finish_audit
from gateway.api.bodies import Body
from gateway.errors import BackboneUnavailable, MethodNotAllowed, RequestMalformed, ServiceError, Unauthorized
from gateway.ids import request_id as new_request_id
from gateway.inference.handler import NOT_FOUND, NOT_FOUND_HEADERS
from gateway.mcp.endpoint import AgentEndpoint
from gateway.operations.redis_health import RedisHealth
from gateway.pages.error_pages import render_not_found, wants_page
from gateway.server.lifespan import running
from gateway.server.serve import TimedReceive
from gateway.services import Injected, ProcessState, Services
from gateway.settings import BadSettings, Settings, load
from gateway.telemetry import tracing
from gateway.telemetry.metrics import Metrics
from gateway.validation import explain

logger = structlog.get_logger()

API_BODY_BYTES = 1_048_576  # the inference path, uploads and security scans have their own limits


# -- operation -----------------------------------------------------------------------------------------------


class ProcessStatus(msgspec.Struct, omit_defaults=True):
    status: str
    warning: str = ""


@get("/health", tags=["Operation"], sync_to_thread=False)
def health() -> ProcessStatus:
    """The process responds."""
    return ProcessStatus("ok")


@get("/ready", tags=["Operation"], errors=[BackboneUnavailable])
async def ready(
    registry: Injected[Registry], redis_health: Injected[RedisHealth], process: Injected[ProcessState]
) -> ProcessStatus:
    """Redis accepts writes, its clock and this one agree, and the process is not draining.

    `warning` explains why some accounts cannot be served, or that `GATEWAY_ENCRYPTION_KEY` lacks a key.
    """
    if process.draining:
        raise BackboneUnavailable("This process is shutting down; send the request to another process.")
    warning = await redis_health.check()
    await redis_health.check_clock()
    # Not whether it is current: while Redis is slow, the subscription to changes is lost, and requests succeed.
    if not registry.cache.is_loaded:
        raise BackboneUnavailable
    return ProcessStatus("ready", warning or process.warning)


@get("/metrics", media_type="text/plain; version=0.0.4", tags=["Operation"], sync_to_thread=False)
def metrics(metrics: Injected[Metrics]) -> bytes:
    """Metrics for Prometheus."""
    return metrics.render()


ROUTES: list[ControllerRouterHandler] = [
    health,
    ready,
    metrics,
    *pages.ROUTES,
    *sign_in.ROUTES,
    *documentation.ROUTES,
    *install.ROUTES,
    *platform.ROUTES,
    *reporting.ROUTES,
    *account.ROUTES,
    *members.ROUTES,
    *apps.ROUTES,
    *usage.ROUTES,
    *events.ROUTES,
    *notices.ROUTES,
    *deploys.ROUTES,
    *data.ROUTES,
    *tls.ROUTES,
]


# Pages for operators and this host. Proxies keep them from the public by their paths, so no other spelling works,
# such as `/metrics/` or `//metrics`, to which Litestar would route as well.
PRIVATE = {"/health", "/ready", "/metrics", "/platform/tls/allow"}
UNKNOWN = "/not-found"


# -- errors --------------------------------------------------------------------------------------------------


def render_error(request: Request[Any, Any, State], error: Exception) -> Response[bytes]:
    if isinstance(error, HTTPException) and error.status_code == 404:
        if wants_page(request.method, request.headers.get("accept", "")):
            page, page_headers = render_not_found()
            return Response(page, status_code=404, media_type="text/html", headers=page_headers)
        return Response(NOT_FOUND, status_code=404, headers={k.decode(): v.decode() for k, v in NOT_FOUND_HEADERS})
    request_id = request.scope["state"].get("request_id", "")
    answer = map_error(error, request)
    if answer is None:
        logger.error("request.crashed", request_id=request_id, exc_info=error)
        answer = ServiceError()
    headers, body = answer.render(request_id)
    return Response(
        body,
        status_code=answer.status,
        media_type="application/json",
        headers={k.decode(): v.decode() for k, v in headers if k != b"content-length"},
    )


def map_error(error: Exception, request: Request[Any, Any, State]) -> ServiceError | None:
    """Maps an error of a request to the error for its caller. Returns None for a bug."""
    match error:
        case ServiceError():
            return error
        case RecursionError():
            return RequestMalformed("The body is nested too deeply.")
        case HTTPException(status_code=405):
            return MethodNotAllowed(*request.app.state.allowed_methods.find(request.scope["path"]))
        case HTTPException(status_code=413):
            most = request.route_handler.resolve_request_max_body_size() or 0
            return RequestMalformed(f"body: must have at most {most // 1024:,} KiB.")
        case HTTPException(status_code=400):
            return RequestMalformed(describe_fields(error, request.route_handler))
        case HTTPException(status_code=401):
            return Unauthorized()
    return None


def describe_fields(error: HTTPException, handler: HTTPRouteHandler) -> str:
    """Describes each invalid field of the handler and its dependencies. Repeats no value, which may be secret."""
    parts: list[Provide | HTTPRouteHandler] = [*handler.resolve_dependencies().values(), handler]
    parameters = {name: field for each in parts for name, field in each.parsed_fn_signature.parameters.items()}
    faults = []
    for fault in error.extra if isinstance(error.extra, list) else []:
        key, message = fault.get("key", "data"), str(fault.get("message"))
        if key == "data":
            faults.append(f"body: {'must not be empty' if message == repr(key) else explain(message, None)}")
        else:
            known = parameters.get(key)
            name = known.kwarg_definition.name if known and isinstance(known.kwarg_definition, ParameterKwarg) else None
            faults.append(f"{name or key}: {explain(message, known and known.annotation)}")
    return "; ".join(faults) or str(error.detail)


class AllowedMethods:
    """The methods of every address, because Litestar does not report them for a 405.

    They are in a tree of path segments. As in Litestar's routing, a fixed segment takes precedence over a parameter.
    """

    PARAMETER, METHODS = "{}", "/"  # "/" cannot be a segment

    def __init__(self, routes: Iterable[object]) -> None:
        self._root: dict[str, Any] = {}
        for route in routes:
            if isinstance(route, HTTPRoute):
                node = self._root
                for segment in split(route.path_format):
                    node = node.setdefault(self.PARAMETER if segment.startswith("{") else segment, {})
                node[self.METHODS] = sorted(route.methods)

    def find(self, path: str) -> list[str]:
        """Returns the methods of an address, or an empty list if there is no such address."""
        node = self._root
        for segment in split(path):
            found = node.get(segment) or node.get(self.PARAMETER)
            if found is None:
                return []
            node = found
        methods: list[str] = node.get(self.METHODS, [])
        return methods


def split(path: str) -> list[str]:
    return path.strip("/").split("/")


# -- the application -----------------------------------------------------------------------------------------


class Part(Provide):
    """A part of the process, for routes that name it.

    Litestar compares each with each, for each route. Comparing identities saves a tenth of a second of each start.
    """

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, part: object) -> None:
        super().__init__(lambda: part, sync_to_thread=False, use_cache=True)


class Front:
    """Routes the inference path to its bare ASGI handler and the rest to Litestar, whose responses get more headers."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._inference: ASGIApp = services.inference
        self._agents = AgentEndpoint(services)
        self.litestar = Litestar(
            ROUTES,
            dependencies={name: Part(part) for name, part in vars(services).items()},
            dto=Body,
            return_dto=None,
            exception_handlers={Exception: render_error},
            before_send=[finish_audit],
            lifespan=[lambda _: running(services), self._agents.running],
            logging_config=None,
            openapi_config=openapi.config(),
            state=State({"base_url": services.settings.base_url, "services": services}),
            request_max_body_size=API_BODY_BYTES,
        )
        self._methods = self.litestar.state.allowed_methods = AllowedMethods(self.litestar.routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # type: ignore[comparison-overlap]
            return await self.litestar(scope, receive, send)
        path = scope["path"]
        if path.startswith("/capsule/"):
            return await self._inference(scope, receive, send)
        if path not in PRIVATE and "/".join(("", *filter(None, path.split("/")))) in PRIVATE:
            scope["path"] = path = UNKNOWN
        request_id = scope.setdefault("state", {})["request_id"] = new_request_id()
        receive = timed = TimedReceive(receive)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                timed.answered = True
                leave_lane(scope["state"])
                message["headers"] = complete_headers(message["headers"], request_id)
            await send(message)

        if path == "/mcp":
            return await RequestMeter(self._agents(scope, receive, send_with_id), scope["state"])
        # Litestar would require a credential first.
        if scope.get("method") == "OPTIONS" and (methods := self._methods.find(path)):
            return await answer_options(methods, send_with_id)
        # A coroutine, although Litestar's type is only Awaitable.
        await RequestMeter(self.litestar(scope, receive, send_with_id), scope["state"])


def complete_headers(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    """Adds the request's id. A response that does not say otherwise is stored nowhere: most are an account's own."""
    completed = [*headers, (b"x-request-id", request_id.encode())]
    if not any(name.lower() == b"cache-control" for name, _ in completed):
        completed.append((b"cache-control", b"no-store"))
    return completed


async def answer_options(methods: list[str], send: Send) -> None:
    allow = (b"allow", ", ".join(methods).encode())
    await send({"type": "http.response.start", "status": 204, "headers": [allow]})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def create_app(settings: Settings | None = None) -> Front:
    """Builds the application with the given settings, or those of the environment. Exits if these are invalid."""
    if settings is None:
        try:
            settings = load()
        except BadSettings as error:
            sys.exit(f"The settings are invalid:\n{error}")
    log.configure(settings)
    tracing.start("capsule-gateway")
    services = Services(settings)
    log.WRITER.on_drop = services.metrics.dropped_log_lines.inc
    return Front(services)
