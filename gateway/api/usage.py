"""The usage of an account by hour and day, app and model, and its last requests: for itself, and for operators.

Operators see what the account sees: neither prompts nor answers.
"""

import math
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from litestar import MediaType, Request, Response, get
from litestar.datastructures import State
from litestar.params import FromPath, FromQuery, QueryParameter
from litestar.response import Stream

from gateway.api.authentication import account_router, operator_router
from gateway.api.resources import AnyAccount, Caller, CallerAccess
from gateway.deploys.records import DeployRecords
from gateway.deploys.views import DeployView, view_deploys
from gateway.errors import NotFound, RequestMalformed
from gateway.ids import Time, now_iso
from gateway.operations.overview import Overview
from gateway.operations.snapshot import Hour
from gateway.redis.client import Store
from gateway.services import Injected
from gateway.telemetry.usage import LOGGED_REQUESTS, Outcome
from gateway.telemetry.usage_reports import (
    PERIOD_SECONDS,
    DetailedRequest,
    Group,
    Period,
    RequestFilter,
    RequestRow,
    UsageRow,
    as_csv,
    as_json,
    read_request,
    read_requests,
    read_usage,
)
from gateway.validation import parse_span, parse_time

DEFAULT_SPAN_SECONDS: dict[Period, int] = {"hour": 86_400, "day": 30 * 86_400}


class HourlyUsage(msgspec.Struct):
    hour: Time
    requests: int
    refused: int
    inputTokens: int
    outputTokens: int


class UsageReport(msgspec.Struct):
    rows: list[UsageRow]


@get("/usage", errors=[RequestMalformed])
async def show_usage(
    account: Caller,
    request: Request[Any, Any, State],
    store: Injected[Store],
    since: Annotated[str | None, QueryParameter(name="from")] = None,
    until: Annotated[str | None, QueryParameter(name="to")] = None,
    by: FromQuery[Period | None] = None,
    group: FromQuery[Group | None] = None,
    app: FromQuery[str | None] = None,
) -> Response[list[HourlyUsage] | UsageReport]:
    """Requests, tokens and money by hour or day.

    `from` is inclusive and `to` is exclusive. Both are times or dates in ISO 8601, in UTC unless they have an offset,
    or how long ago, such as `1h`. The default is the last 24 hours or 30 days. Hours are kept for 14 days, days for 400
    days. Rows without requests are left out. `app` (its name) counts only this app. `Accept: text/csv` returns CSV.
    Without parameters, the response is a list of the last 24 hours with only requests and tokens; its last entry is the
    current hour.
    """
    if (since, until, by, group, app) == (None,) * 5 and not wants_csv(request):
        return Response(await _read_last_day(account.id, store))
    return await report_usage(account.id, request, store, since, until, by, group, app)


def wants_csv(request: Request[Any, Any, State]) -> bool:
    return "text/csv" in request.headers.get("accept", "")


async def report_usage(
    account: str,
    request: Request[Any, Any, State],
    store: Store,
    since: str | None,
    until: str | None,
    by: Period | None,
    group: Group | None,
    app: str | None,
) -> Response[Any]:
    """Returns the usage of an account as JSON or CSV. Raises RequestMalformed."""
    now: int = (await store.client.time())[0]
    period, grouping = by or "hour", group or "none"
    # Hours and days begin with a whole second.
    end = now if until is None else math.ceil(parse_time("to", until))
    start = end - DEFAULT_SPAN_SECONDS[period] if since is None else math.ceil(parse_time("from", since))
    if start >= end:
        raise RequestMalformed("from: must be before to.")
    usage = read_usage(store, account, period, grouping, app=app, start=start, end=end, now=now)
    if wants_csv(request):
        headers = {"content-disposition": f'attachment; filename="usage-by-{period}.csv"'}
        return _stream(await as_csv(usage, grouping), "text/csv", headers)
    return _stream(await as_json(usage), MediaType.JSON)


def _stream(pieces: list[bytes], media_type: str, headers: dict[str, str] | None = None) -> Response[Any]:
    """Streams the pieces, so that a long report does not delay other requests.

    Given a list, Litestar would use a thread for each piece.
    """

    async def send() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return Stream(send(), media_type=media_type, headers=headers)


async def _read_last_day(account: str, store: Store) -> list[HourlyUsage]:
    """Returns the last 24 hours, oldest first."""
    now: int = (await store.client.time())[0]
    start = now - DEFAULT_SPAN_SECONDS["hour"]
    usage = read_usage(store, account, "hour", "none", app=None, start=start, end=now, now=now)
    found = {row.start: row async for rows in usage for row in rows}
    present = now // PERIOD_SECONDS["hour"] * PERIOD_SECONDS["hour"]
    hours = [now_iso(present - PERIOD_SECONDS["hour"] * ago) for ago in reversed(range(24))]
    used = [found.get(hour, UsageRow(start=hour)) for hour in hours]
    return [HourlyUsage(row.start, row.requests, row.refused, row.inputTokens, row.outputTokens) for row in used]


@get("/requests", errors=[RequestMalformed])
async def list_requests(
    account: Caller,
    store: Injected[Store],
    limit: Annotated[int, QueryParameter(ge=1, le=LOGGED_REQUESTS)] = LOGGED_REQUESTS,
    app: FromQuery[str | None] = None,
    model: FromQuery[str | None] = None,
    outcome: FromQuery[Outcome | None] = None,
    code: Annotated[str | None, QueryParameter(pattern=r"^[A-Z_]+$")] = None,
    since: Annotated[str | None, QueryParameter(name="from")] = None,
    until: Annotated[str | None, QueryParameter(name="to")] = None,
    before: FromQuery[str | None] = None,
) -> list[RequestRow]:
    """The last requests to the account's apps, newest first.

    The last 1,000 requests are kept, including refused ones, without prompts, answers and users. `app` (its name),
    `model`, `outcome` and `code` filter the rows. The outcome is `interrupted` if the client disconnected, or if the
    request cost something although it failed. `from` is inclusive and `to` is exclusive; both are times of arrival, in
    the format of `GET /account/usage`. `before` is the id of a request: only older ones are listed.
    """
    span = parse_span(since, until, "from", "to")
    chosen = RequestFilter(app or None, model, outcome, code, span)
    return await read_requests(store, account.id, chosen, limit, before)


@get("/requests/{request_id:str}", errors=[NotFound])
async def show_request(access: CallerAccess, request_id: FromPath[str], store: Injected[Store]) -> DetailedRequest:
    """One of the last requests, with its reservation, its wait, and the limits that were in force."""
    found = await read_request(store, access.account.id, request_id)
    access.require_app(found.app)
    return found


@get("/usage", errors=[RequestMalformed])
async def show_service_usage(
    overview: Injected[Overview], hours: Annotated[int, QueryParameter(ge=1, le=336)] = 24
) -> list[Hour]:
    """Requests, error codes and money of all accounts by hour, oldest first.

    The last entry is the current hour. Two weeks are kept.
    """
    return await overview.read_hours(hours)


@get("/accounts/{account_id:str}/usage", errors=[RequestMalformed, NotFound])
async def show_account_usage(
    any_account: AnyAccount,
    request: Request[Any, Any, State],
    store: Injected[Store],
    since: Annotated[str | None, QueryParameter(name="from")] = None,
    until: Annotated[str | None, QueryParameter(name="to")] = None,
    by: FromQuery[Period | None] = None,
    group: FromQuery[Group | None] = None,
    app: FromQuery[str | None] = None,
) -> Response[UsageReport]:
    """Requests, tokens and money of an account, by hour or day.

    The parameters are those of `GET /account/usage`. `Accept: text/csv` returns CSV.
    """
    return await report_usage(any_account.id, request, store, since, until, by, group, app)


@get("/accounts/{account_id:str}/requests", errors=[RequestMalformed, NotFound])
async def list_account_requests(
    any_account: AnyAccount,
    store: Injected[Store],
    limit: Annotated[int, QueryParameter(ge=1, le=LOGGED_REQUESTS)] = 50,
    app: FromQuery[str | None] = None,
    code: Annotated[str | None, QueryParameter(pattern=r"^[A-Z_]+$")] = None,
    before: FromQuery[str | None] = None,
) -> list[RequestRow]:
    """The last requests to an account's apps, newest first.

    `app` (its name) and `code` filter the rows, as in `GET /account/requests`.
    """
    return await read_requests(store, any_account.id, RequestFilter(app or None, code=code), limit, before)


@get("/accounts/{account_id:str}/deploys", errors=[RequestMalformed, NotFound])
async def list_account_deploys(
    any_account: AnyAccount,
    deploy_records: Injected[DeployRecords],
    app: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=1000)] = 50,
    before: FromQuery[str] = "",
) -> list[DeployView]:
    """List an account's deploys, newest first."""
    return await view_deploys(await deploy_records.list(any_account.id, app, limit, before), deploy_records)


ROUTES = [
    account_router(show_usage, list_requests, show_request),
    operator_router(show_service_usage, show_account_usage, list_account_requests, list_account_deploys),
]
