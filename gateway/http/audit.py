"""The operators' API: the audit trail, and how the other routes write it.

`operators_only` begins the record of every request that may change something, and `finish_audit` sees the answer. So
every route is recorded, also one that is added later.
"""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, get
from litestar.datastructures import State
from litestar.handlers import BaseRouteHandler
from litestar.params import FromQuery, QueryParameter
from litestar.types import Message, Scope

from gateway.accounts.operators import Operator
from gateway.errors import RequestMalformed
from gateway.operations.audit import AuditRecord, Trail, Value, describe_answer, describe_body
from gateway.process import Gateway, Injected

RECORD = "audit"  # in the scope's state: the record, and the trail that it belongs to
BEFORE = "before"  # likewise: values before the change
REPORTS: dict[str, Trail] = {"audit": "reports"}  # `opt` of routes that machines call
ANSWER_BYTES = 65_536  # that are searched for what was made

Limit = Annotated[int, QueryParameter(ge=1, le=200)]
Before = Annotated[str | None, QueryParameter(pattern=r"^[1-9]\d{0,14}-\d{1,9}$")]


async def begin_audit(
    request: Request[Any, Any, State], gateway: Gateway, operator: Operator, handler: BaseRouteHandler
) -> None:
    """Raises BackboneUnavailable."""
    state, trail = request.scope["state"], handler.opt.get("audit", "changes")
    target = next((str(value) for value in request.path_params.values()), "")[:200]
    record = await gateway.audit.begin(
        trail, operator, handler.name or handler.fn.__name__, target, state["request_id"]
    )
    state[RECORD] = gateway, trail, record


def note_before(request: Request[Any, Any, State], **values: Value) -> None:
    """Adds to the request's record what the values were before the change."""
    request.scope["state"][BEFORE] = {f"{name} before": value for name, value in values.items()}


async def finish_audit(message: Message, scope: Scope) -> None:
    """Litestar calls this before it sends each message."""
    if RECORD not in scope["state"]:
        return
    gateway, trail, record = scope["state"][RECORD]
    if message["type"] == "http.response.start":
        record.status = message["status"]
    elif message["type"] == "http.response.body" and not message.get("more_body"):
        del scope["state"][RECORD]
        made, record.code = describe_answer(message.get("body", b"")[:ANSWER_BYTES])
        record.target = record.target or str(made.get("id", ""))
        if made.get("id") == record.target:
            del made["id"]
        record.details = {**describe_body(scope["state"].get("body")), **scope["state"].get(BEFORE, {}), **made}
        await gateway.audit.finish(trail, record)


@get("/audit", errors=[RequestMalformed])
async def list_audit(
    gateway: Injected, trail: FromQuery[Trail] = "changes", limit: Limit = 50, before: Before = None
) -> list[AuditRecord]:
    """What operators changed, newest first.

    The trail `reports` has what watchdogs, scanners and deploy engines reported. `before` is the id of a record.
    """
    return await gateway.audit.list(trail, limit, before)
