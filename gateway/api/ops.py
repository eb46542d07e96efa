"""The operators' page: its files, logging in to it, and its live figures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody
from litestar.response import Stream

from gateway.accounts.sessions import OPERATOR
from gateway.api.account import is_operator
from gateway.api.operators import operator_subject, operators_only
from gateway.api.pages import PAGES, page_file
from gateway.errors import Unauthorized, ViewersLimited
from gateway.process import Injected

OPS = PAGES / "ops"
VIEWERS = 50  # of one process
SIGHT = 600.0  # seconds after which a viewer's credential is looked at again: the browser comes back by itself


@get("/ops", sync_to_thread=False)
def ops_page() -> Response[bytes]:
    return page_file(OPS, "index.html")


@get("/ops/{file:str}", sync_to_thread=False)
def ops_file(file: FromPath[str]) -> Response[bytes]:
    return page_file(OPS, file)


@get("/ops/events", guards=[operators_only])
async def ops_events(gateway: Injected) -> Stream:
    """A snapshot as an event every two seconds; `event: away` while Redis is."""
    if gateway.watch.viewers >= VIEWERS:
        raise ViewersLimited(retry_after=60)

    async def events() -> AsyncGenerator[bytes]:
        until = time.monotonic() + SIGHT
        async with contextlib.aclosing(gateway.watch.events()) as seen:
            async for event in seen:
                yield event
                if gateway.draining or time.monotonic() > until:
                    return

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return Stream(events(), media_type="text/event-stream", headers=headers)


class OperatorLogIn(msgspec.Struct, forbid_unknown_fields=True):
    token: str


@post("/ops/session", status_code=204)
async def log_in(request: Request[Any, Any, State], data: JSONBody[OperatorLogIn], gateway: Injected) -> Response[None]:
    """Changes the operator token for the page's cookie, so that no script of a page ever keeps the token."""
    sessions = gateway.sessions
    sessions.require_own_origin(request)
    await sessions.attempt(request)
    if not is_operator(gateway, data.token):
        raise Unauthorized("This is not the operator token.")
    await sessions.succeeded(request)
    return Response(None, cookies=[sessions.cookie(OPERATOR, await sessions.open(operator_subject(gateway)))])


@delete("/ops/session")
async def log_out(request: Request[Any, Any, State], gateway: Injected) -> Response[None]:
    sessions = gateway.sessions
    sessions.require_own_origin(request)
    await sessions.close(sessions.token_of(request, OPERATOR))
    return Response(None, status_code=204, cookies=[sessions.cookie(OPERATOR, "")])


ROUTES = [ops_page, ops_file, ops_events, log_in, log_out]
