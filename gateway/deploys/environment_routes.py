"""The account API: an app's environment variables, and the output of its start command."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from litestar import Request, Response, get, put
from litestar.datastructures import State
from litestar.params import FromPath, QueryParameter
from litestar.response import Stream

from gateway.accounts.records import App
from gateway.deploys.environment import VariableView
from gateway.deploys.routes import require_own_app
from gateway.errors import NotFound, RequestMalformed, RequestTooLarge, ViewersLimited
from gateway.http.authentication import Caller, account_router
from gateway.http.bodies import decode_map
from gateway.process import Gateway, Injected

BODY_BYTES = 524_288  # JSON may encode a byte as six
DEFAULT_TAIL = 200  # lines
MAX_TAIL = 10_000
MAX_FOLLOWERS = 10  # of one account, in one process
STREAM_SECONDS = 3_600.0
HEARTBEAT_SECONDS = 15.0  # of silence, after which a comment keeps proxies from closing the stream

VARIABLES = {
    "application/json": {
        "schema": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "example": {"DATABASE_URL": "postgres://…", "OLD_NAME": None},
    }
}


@get("/apps/{app:str}/env", summary="List the names of an app's environment variables", errors=[NotFound])
async def list_variables(account: Caller, app: FromPath[str], gateway: Injected) -> list[VariableView]:
    return await gateway.environments.list_variables(await require_own_app(app, account, gateway))


@put(
    "/apps/{app:str}/env",
    request_max_body_size=BODY_BYTES,
    body=VARIABLES,
    errors=[RequestMalformed, NotFound, RequestTooLarge],
)
async def change_variables(
    account: Caller, request: Request[Any, Any, State], app: FromPath[str], gateway: Injected
) -> list[VariableView]:
    """Change an app's environment variables.

    They apply to builds and start commands from the next deploy on. `null` removes a variable; variables that are not
    named stay. Values are never shown again.
    """
    found = await require_own_app(app, account, gateway)
    await gateway.environments.change_variables(found, decode_map(await request.body(), str | None))
    return await gateway.environments.list_variables(found)


@get("/apps/{app:str}/logs", media_type="text/plain", errors=[RequestMalformed, NotFound, ViewersLimited])
async def read_logs(
    account: Caller,
    request: Request[Any, Any, State],
    app: FromPath[str],
    gateway: Injected,
    tail: Annotated[int, QueryParameter(ge=1, le=MAX_TAIL)] = DEFAULT_TAIL,
) -> Response[str] | Stream:
    """Show the output of an app's start command.

    The last lines, as text. With `Accept: text/event-stream`, each new line follows as an event. At most 1 MiB is kept.
    """
    found = await require_own_app(app, account, gateway)
    if found.build is None or found.build.start is None:
        raise NotFound("This app has no start command, so it has no output; its visitors get files.")
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff", "x-accel-buffering": "no"}
    if "text/event-stream" in request.headers.get("accept", ""):
        if gateway.runtime_log.followers[account.id] >= MAX_FOLLOWERS:
            raise ViewersLimited(
                f"An account can follow {MAX_FOLLOWERS} logs at once; end one of them.", retry_after=60
            )
        # Without this, the stream would get the route's media type, which is that of the text.
        headers["content-type"] = "text/event-stream"
        return Stream(_events(found, gateway, tail), headers=headers)
    live = await gateway.deploys.find_live_id(found)
    lines = [] if live is None else await gateway.runtime_log.tail(live, tail)
    text = "".join(line + "\n" for line in lines)
    return Response(text, media_type="text/plain", headers=headers)


async def _events(app: App, gateway: Gateway, tail: int) -> AsyncGenerator[bytes]:
    followers = gateway.runtime_log.followers
    followers[app.account] += 1
    try:
        ends, spoke = time.monotonic() + STREAM_SECONDS, time.monotonic()
        lines = gateway.runtime_log.follow(
            lambda: gateway.deploys.find_live_id(app), tail, lambda: gateway.draining or time.monotonic() > ends
        )
        async with contextlib.aclosing(lines):
            async for new in lines:
                if new:
                    yield "".join(f"data: {line}\n\n" for line in new).replace("\r", "").encode()
                elif time.monotonic() - spoke > HEARTBEAT_SECONDS:
                    yield b": waiting\n\n"
                else:
                    continue
                spoke = time.monotonic()
    finally:
        followers[app.account] -= 1
        if not followers[app.account]:
            del followers[app.account]


ROUTES = [account_router(list_variables, change_variables, read_logs)]
