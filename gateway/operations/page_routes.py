"""The operators' page: its files, log-in and live figures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar import Request, Response, delete, get, post, route
from litestar.datastructures import State
from litestar.params import JSONBody
from litestar.response import Stream

from gateway.accounts.sessions import OPERATOR
from gateway.bounds import Credential
from gateway.errors import Unauthorized, ViewersLimited
from gateway.http.assets import bundle_pages, html_response, page_text
from gateway.http.authentication import OPERATOR_SECURITY, close_session, open_session, operators_only
from gateway.http.pages import HTML, LOG_IN_ERRORS, LOG_OUT_ERRORS, READ
from gateway.process import Injected

MAX_VIEWERS = 50  # of one process
STREAM_SECONDS = 600.0  # after which the browser reconnects, and the credential is checked again


@route("/ops", http_method=READ, media_type=HTML, tags=["Pages"])
async def ops_page(request: Request[Any, Any, State]) -> Response[bytes]:
    """Show the operators' page."""
    await bundle_pages()
    return html_response(request, page_text("ops"))


@get(
    "/ops/events",
    media_type="text/event-stream",
    guards=[operators_only],
    tags=["Pages"],
    security=OPERATOR_SECURITY,
    errors=[ViewersLimited],
)
async def ops_events(gateway: Injected) -> Stream:
    """Stream the figures of the operators' page, every two seconds.

    The response is a stream of server-sent events. The event `away` means that Redis does not answer.
    """
    if gateway.feed.viewers >= MAX_VIEWERS:
        raise ViewersLimited(retry_after=60)

    async def events() -> AsyncGenerator[bytes]:
        until = time.monotonic() + STREAM_SECONDS
        async with contextlib.aclosing(gateway.feed.stream_events()) as snapshots:
            async for event in snapshots:
                yield event
                if gateway.draining or time.monotonic() > until:
                    return

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return Stream(events(), media_type="text/event-stream", headers=headers)


class OperatorLogIn(msgspec.Struct, forbid_unknown_fields=True):
    token: Credential


@post("/ops/session", status_code=204, tags=["Pages"], errors=LOG_IN_ERRORS)
async def log_in(request: Request[Any, Any, State], data: JSONBody[OperatorLogIn], gateway: Injected) -> Response[None]:
    """Log in with the operator token.

    Exchanges the token for a cookie, so that no script of the page has to keep the token.
    """
    async with gateway.sessions.attempt(request):
        operator = gateway.operators.find(data.token)
        if operator is None:
            raise Unauthorized("This is not an operator token.")
    return await open_session(gateway, OPERATOR, operator.subject)


@delete("/ops/session", tags=["Pages"], errors=LOG_OUT_ERRORS)
async def log_out(request: Request[Any, Any, State], gateway: Injected) -> Response[None]:
    """Log out."""
    return await close_session(gateway, OPERATOR, request)


ROUTES = [ops_page, ops_events, log_in, log_out]
