"""The account API: the stream of changes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from litestar import get
from litestar.response import Stream

from gateway.errors import ViewersLimited
from gateway.http.authentication import Caller, account_router
from gateway.process import Injected


@get("/changes", media_type="text/event-stream", errors=[ViewersLimited])
async def stream_changes(account: Caller, gateway: Injected) -> Stream:
    """Stream the names of what changed in the account.

    The response is a stream of server-sent events without content. `ready` is the first: later changes are reported,
    usually within a second. Then each event is named after a topic that changed: `apps`, `data`, `deliveries`,
    `deploys`, `hooks`, `keys`, `requests`, `service` (the status of managed inference) or `usage`. The health,
    findings, crashes and data of apps are checked every five seconds. The stream ends after ten minutes, and when the
    service restarts or cannot reach its database: read everything again once `ready` arrives on the next one.
    """
    gateway.changes.admit(account.id)

    async def events() -> AsyncGenerator[bytes]:
        stream = gateway.changes.stream_events(account.id, lambda: gateway.draining)
        async with contextlib.aclosing(stream):
            async for event in stream:
                yield event

    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff", "x-accel-buffering": "no"}
    return Stream(events(), media_type="text/event-stream", headers=headers)


ROUTES = [account_router(stream_changes)]
