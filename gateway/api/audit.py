"""Records requests in the operators' audit trail and in those of accounts, and lists the operators' trail.

The guards begin a record for every request that may change something: `operators_only` with `begin_audit`, and
`account_only` with `begin_change`. `finish_audit` completes it from the response. So every route is recorded, including
future ones. An operator's change of an account is also in the account's trail.

The header `X-Reason` says why. It is free text, and an invalid one is not recorded: the request is refused.
"""

from typing import Annotated, Any
from urllib.parse import unquote

from litestar import Request, get
from litestar.datastructures import State
from litestar.handlers import BaseRouteHandler
from litestar.params import FromQuery, QueryParameter
from litestar.types import Message, Scope

from gateway.accounts.access import Access, Call
from gateway.accounts.operators import Operator, Operators
from gateway.accounts.trail import SECRET, hide_secret
from gateway.errors import RequestMalformed
from gateway.operations.audit import (
    AuditFilter,
    AuditRecord,
    AuditTrail,
    Trail,
    Value,
    describe_body,
    read_response,
)
from gateway.services import Injected, Services
from gateway.validation import END, declare_pattern

RECORD = "audit"  # in the scope's state: the services, the trail and the record
CHANGE = "change"  # in the scope's state: the services, the caller, the call, its target and its entry
ACCOUNT = "audited_account"  # in the scope's state: the id of the account that an operator changes
NOTES = "notes"  # in the scope's state: values such as those before the change
REPORTS: dict[str, Trail] = {"audit": "reports"}  # the `opt` of routes for machines
REASON = "x-reason"  # a header, because requests that delete have no body
REASON_LENGTH = 500  # characters
RESPONSE_BYTES = 65_536  # that are searched for the id and the error code

Limit = Annotated[int, QueryParameter(ge=1, le=200)]
Chosen = Annotated[str, QueryParameter(max_length=200)]
RECORD_ID = declare_pattern(
    r"^[1-9][0-9]{0,14}-[0-9]{1,9}" + END, "must be the id of a record, such as 1782993600000-0"
)
Before = Annotated[str | None, QueryParameter(pattern=RECORD_ID)]


async def begin_audit(
    request: Request[Any, Any, State], services: Services, operator: Operator, handler: BaseRouteHandler
) -> None:
    """Begins the record of a request. Raises BackboneUnavailable, and RequestMalformed for an invalid reason."""
    reason, fault = _read_reason(request, services.operators)
    state, trail = request.scope["state"], handler.opt.get("audit", "changes")
    target = hide_secret(_find_target(request))
    if trail == "changes":
        state[ACCOUNT] = await _find_account(request, services)
    record = await services.audit.begin_record(
        trail, operator, handler.name or handler.fn.__name__, target, state["request_id"], reason
    )
    state[RECORD] = services, trail, record
    if fault:
        raise RequestMalformed(f"X-Reason: {fault}")


def find_operator(request: Request[Any, Any, State]) -> str:
    """Returns the name of the operator who makes the change."""
    _, _, record = request.scope["state"][RECORD]
    name: str = record.operator
    return name


def _find_target(request: Request[Any, Any, State]) -> str:
    return next(iter(_list_targets(request)), "")[:200]


def _list_targets(request: Request[Any, Any, State]) -> list[str]:
    # A parameter that may contain slashes begins with one.
    return [str(value).removeprefix("/") for value in request.path_params.values()]


async def _find_account(request: Request[Any, Any, State], services: Services) -> str:
    """Returns the id of the account that the request's address names, or that has the app it names; or ""."""
    if app := request.path_params.get("app"):
        found = await services.registry.find_app(app)
        return "" if found is None else found.account
    return str(request.path_params.get("account_id", ""))


async def begin_change(request: Request[Any, Any, State], services: Services, access: Access, call: Call) -> None:
    """Begins the entry of a request in the account's trail, which names a domain with its app."""
    target = "/".join(_list_targets(request))
    entry = await services.account_trail.begin(access, call.name, target)
    request.scope["state"][CHANGE] = services, access, call, target, entry


async def finish_change(message: Message, scope: Scope) -> None:
    """Removes the entry of a change that was refused, and adds the id of what was made, or an app's name."""
    services, access, call, target, entry = scope["state"][CHANGE]
    if message["type"] == "http.response.start":
        # After a failure of the service, the change may have been made.
        if 400 <= message["status"] < 500:
            del scope["state"][CHANGE]
            await services.account_trail.forget(access, entry)
    elif message["type"] == "http.response.body" and not message.get("more_body"):
        del scope["state"][CHANGE]
        made, _ = read_response(message.get("body", b"")[:RESPONSE_BYTES])
        if not target and made.get("id", access.account.id) != access.account.id:
            await services.account_trail.forget(access, entry)
            name = scope["state"]["body"].name if call.name == "create_app" else made["id"]
            await services.account_trail.begin(access, call.name, str(name))


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


def note(request: Request[Any, Any, State], **values: Value) -> None:
    """Adds values to the request's record."""
    notes = request.scope["state"].setdefault(NOTES, {})
    notes.update({name: hide_secret(value) if isinstance(value, str) else value for name, value in values.items()})


def note_before(request: Request[Any, Any, State], **values: Value) -> None:
    """Adds the values before the change to the request's record."""
    note(request, **{f"{name} before": value for name, value in values.items()})


async def finish_audit(message: Message, scope: Scope) -> None:
    """Completes the record of a request. Litestar calls it before each message of a response."""
    if CHANGE in scope["state"]:
        await finish_change(message, scope)
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
        if trail == "changes" and record.status is not None and record.status < 400:
            given = getattr(scope["state"].get("body"), "account", "")
            created = record.target if record.action == "create_account" else ""
            for account in {scope["state"][ACCOUNT], given, created} - {""}:
                made_or_gone = str(record.details.get("id") or record.details.get("key") or "")  # of the account
                target = made_or_gone if record.target == account else record.target
                await services.account_trail.add_operators_change(account, record.operator, record.action, target)


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
