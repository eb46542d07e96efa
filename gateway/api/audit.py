"""Records operators' requests in the audit trail, and lists the trail.

`operators_only` begins a record for every request that may change something, and `finish_audit` completes it from the
response. So every route is recorded, including future ones.

The header `X-Reason` says why. It is free text, and an invalid one is not recorded: the request is refused.
"""

import re
from typing import Annotated, Any
from urllib.parse import unquote

from litestar import Request, get
from litestar.datastructures import State
from litestar.handlers import BaseRouteHandler
from litestar.params import FromQuery, QueryParameter
from litestar.types import Message, Scope

from gateway.accounts.operators import Operator, Operators
from gateway.errors import RequestMalformed
from gateway.operations.audit import (
    HIDDEN,
    AuditFilter,
    AuditRecord,
    AuditTrail,
    Trail,
    Value,
    describe_body,
    read_response,
)
from gateway.services import Injected, Services

RECORD = "audit"  # in the scope's state: the services, the trail and the record
NOTES = "notes"  # in the scope's state: values such as those before the change
REPORTS: dict[str, Trail] = {"audit": "reports"}  # the `opt` of routes for machines
REASON = "x-reason"  # a header, because requests that delete have no body
REASON_LENGTH = 500  # characters
SECRET = re.compile(r"csk_\w|whsec_\w|/hooks/deploy/\w")  # API keys, signing secrets, the URLs of deploy hooks
RESPONSE_BYTES = 65_536  # that are searched for the id and the error code

Limit = Annotated[int, QueryParameter(ge=1, le=200)]
Chosen = Annotated[str, QueryParameter(max_length=200)]
Before = Annotated[str | None, QueryParameter(pattern=r"^[1-9]\d{0,14}-\d{1,9}$")]


async def begin_audit(
    request: Request[Any, Any, State], services: Services, operator: Operator, handler: BaseRouteHandler
) -> None:
    """Begins the record of a request. Raises BackboneUnavailable, and RequestMalformed for an invalid reason."""
    reason, fault = _read_reason(request, services.operators)
    state, trail = request.scope["state"], handler.opt.get("audit", "changes")
    target = hide_secret(next((str(value) for value in request.path_params.values()), "")[:200])
    record = await services.audit.begin_record(
        trail, operator, handler.name or handler.fn.__name__, target, state["request_id"], reason
    )
    state[RECORD] = services, trail, record
    if fault:
        raise RequestMalformed(f"X-Reason: {fault}")


def _read_reason(request: Request[Any, Any, State], operators: Operators) -> tuple[str, str]:
    """Returns the reason in the request's header, and what is wrong with it. One of them is empty."""
    headers = request.headers.getall(REASON, [])
    if not headers:
        return "", ""
    try:
        reason = unquote(headers[0], errors="strict").strip()
    except UnicodeDecodeError:
        reason = ""
    plain = len(headers) == 1 and headers[0].isascii() and reason.isprintable()
    if not plain or not 1 <= len(reason) <= REASON_LENGTH:
        return "", f"1 to {REASON_LENGTH} characters on one line, as ASCII or as percent-encoded UTF-8."
    if SECRET.search(reason) or any(map(operators.find, reason.split())):
        return "", "leave out secrets, because the audit trail keeps the reason."
    return reason, ""


def hide_secret(text: str) -> str:
    """Returns the text, unless a caller has put a secret in the place of an id."""
    return HIDDEN if SECRET.search(text) else text


def note(request: Request[Any, Any, State], **values: Value) -> None:
    """Adds values to the request's record."""
    notes = request.scope["state"].setdefault(NOTES, {})
    notes.update({name: hide_secret(value) if isinstance(value, str) else value for name, value in values.items()})


def note_before(request: Request[Any, Any, State], **values: Value) -> None:
    """Adds the values before the change to the request's record."""
    note(request, **{f"{name} before": value for name, value in values.items()})


async def finish_audit(message: Message, scope: Scope) -> None:
    """Completes the record of a request. Litestar calls it before each message of a response."""
    if RECORD not in scope["state"]:
        return
    services, trail, record = scope["state"][RECORD]
    if message["type"] == "http.response.start":
        record.status = message["status"]
    elif message["type"] == "http.response.body" and not message.get("more_body"):
        del scope["state"][RECORD]
        made, record.code = read_response(message.get("body", b"")[:RESPONSE_BYTES])
        record.target = record.target or str(made.get("id", ""))
        if made.get("id") == record.target:
            del made["id"]
        record.details = {**describe_body(scope["state"].get("body")), **scope["state"].get(NOTES, {}), **made}
        await services.audit.finish_record(trail, record)


@get("/audit", errors=[RequestMalformed])
async def list_audit(
    audit: Injected[AuditTrail],
    trail: FromQuery[Trail] = "changes",
    limit: Limit = 50,
    before: Before = None,
    operator: Chosen = "",
    action: Chosen = "",
    target: Chosen = "",
) -> list[AuditRecord]:
    """Changes by operators, newest first.

    The trail `reports` has the reports of watchdogs, scanners and deploy engines. `before` is the id of a record.
    `operator`, `action` and `target` choose records with exactly these values.
    """
    return await audit.list_records(trail, limit, before, AuditFilter(operator, action, target))
