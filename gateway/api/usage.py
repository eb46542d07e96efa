"""The usage of an account by hour and day, app and model, and its last requests: for itself, and for operators.

Operators see what the account sees: neither prompts nor answers.
"""

import math
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, TypedDict

import msgspec
from litestar import MediaType, Request, Response, get
from litestar.datastructures import State
from litestar.di import NamedDependency, Provide
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
from gateway.operations.spend import ACCOUNT_COLUMNS, SpendGroup, SpendPeriod, read_spend_by_account
from gateway.redis.client import Store
from gateway.services import Injected
from gateway.telemetry import request_log
from gateway.telemetry.request_log import (
    DetailedRequest,
    RequestFigures,
    RequestFilter,
    RequestRow,
    read_figures,
    read_request,
    read_requests,
)
from gateway.telemetry.usage import LOGGED_REQUESTS, Outcome
from gateway.telemetry.usage_reports import (
    COUNTS,
    PERIOD_SECONDS,
    Group,
    Period,
    UsageRow,
    as_csv,
    as_json,
    read_usage,
)
from gateway.validation import END, declare_pattern, parse_span, parse_time

DEFAULT_SPAN_SECONDS: dict[Period, int] = {"hour": 86_400, "day": 30 * 86_400, "month": 365 * 86_400}


CODE = declare_pattern(r"^[A-Z_]+" + END, "must be capital letters and _, such as TOKEN_INVALID")
Code = Annotated[str | None, QueryParameter(pattern=CODE)]
Since = Annotated[str | None, QueryParameter(name="from")]
Until = Annotated[str | None, QueryParameter(name="to")]


class HourlyUsage(msgspec.Struct):
    hour: Time
    requests: int
    refused: int
    inputTokens: int
    outputTokens: int


class UsageReport(msgspec.Struct):
    rows: list[UsageRow]


class SpendRow(UsageRow, kw_only=True):
    """By account, a row has only `start`, `account`, `accountName` and `nanoEuro`."""

    account: str | msgspec.UnsetType = msgspec.UNSET  # '' for all deleted accounts together
    accountName: str | msgspec.UnsetType = msgspec.UNSET


class SpendReport(msgspec.Struct):
    rows: list[SpendRow]


class ReportRange(TypedDict):
    """In seconds since the epoch."""

    start: int
    end: int
    now: int


@get("/usage", errors=[RequestMalformed])
async def show_usage(
    account: Caller,
    request: Request[Any, Any, State],
    store: Injected[Store],
    since: Since = None,
    until: Until = None,
    by: FromQuery[Period | None] = None,
    group: FromQuery[Group | None] = None,
    app: FromQuery[str | None] = None,
) -> Response[list[HourlyUsage] | UsageReport]:
    """Requests, tokens and money by hour, day or month.

    `from` is inclusive and `to` is exclusive. Both are times or dates in ISO 8601, in UTC unless they have an offset,
    or how long ago, such as `1h`. The default is the last 24 hours, 30 days or 365 days. Hours are kept for 14 days,
    days for 400 days; a month adds up its days that are in the range. Rows without requests are left out. `app` (its
    name) counts only this app. By provider, there are days and months. `Accept: text/csv` returns CSV.
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
    period, grouping = by or "hour", group or "none"
    span = await _read_range(store, period, since, until)
    usage = read_usage(store, account, period, grouping, app=app or None, **span)
    return await _report(request, usage, columns_of(grouping), f"usage-by-{period}.csv")


def columns_of(group: Group) -> list[str]:
    return ["start", *([] if group == "none" else [group]), *COUNTS]


async def _read_range(store: Store, period: Period, since: str | None, until: str | None) -> ReportRange:
    """Raises RequestMalformed."""
    now: int = (await store.client.time())[0]
    # Hours and days begin with a whole second.
    end = now if until is None else math.ceil(parse_time("to", until))
    start = end - DEFAULT_SPAN_SECONDS[period] if since is None else math.ceil(parse_time("from", since))
    if start >= end:
        raise RequestMalformed("from: must be before to.")
    return ReportRange(start=start, end=end, now=now)


async def _report(
    request: Request[Any, Any, State],
    rows: AsyncIterator[Sequence[msgspec.Struct]],
    columns: Sequence[str],
    name: str,
) -> Response[Any]:
    if wants_csv(request):
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return _stream(await as_csv(rows, columns), "text/csv", headers)
    return _stream(await as_json(rows), MediaType.JSON)


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


async def read_filter(
    app: FromQuery[str | None] = None,
    model: FromQuery[str | None] = None,
    outcome: FromQuery[Outcome | None] = None,
    code: Code = None,
    since: Since = None,
    until: Until = None,
) -> RequestFilter:
    """Raises RequestMalformed."""
    return RequestFilter(app or None, model, outcome, code, parse_span(since, until, "from", "to"))


FILTER = {"chosen": Provide(read_filter)}


@get("/requests", errors=[RequestMalformed], dependencies=FILTER)
async def list_requests(
    account: Caller,
    chosen: NamedDependency[RequestFilter],
    request: Request[Any, Any, State],
    store: Injected[Store],
    limit: Annotated[int, QueryParameter(ge=1, le=LOGGED_REQUESTS)] = LOGGED_REQUESTS,
    before: FromQuery[str | None] = None,
) -> Response[list[RequestRow]]:
    """The last requests to the account's apps, newest first.

    The last 1,000 requests are kept, including refused ones, without prompts, answers and users. `app` (its name),
    `model`, `outcome` and `code` filter the rows. The outcome is `interrupted` if the client disconnected, or if the
    request cost something although it failed. `from` is inclusive and `to` is exclusive; both are times of arrival, in
    the format of `GET /account/usage`. `before` is the id of a request: only older ones are listed. `Accept: text/csv`
    returns CSV.
    """
    rows = await read_requests(store, account.id, chosen, limit, before)
    if wants_csv(request):
        headers = {"content-disposition": 'attachment; filename="requests.csv"'}
        return _stream(request_log.as_csv(rows), "text/csv", headers)
    return Response(rows)


@get("/requests/figures", errors=[RequestMalformed], dependencies=FILTER)
async def show_request_figures(
    account: Caller, chosen: NamedDependency[RequestFilter], store: Injected[Store]
) -> RequestFigures:
    """Figures of all logged requests that match: how many, by code and over time, and their times.

    The parameters are those of `GET /account/requests`.
    """
    return await read_figures(store, account.id, chosen)


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


@get("/spend", errors=[RequestMalformed])
async def show_spend(
    request: Request[Any, Any, State],
    store: Injected[Store],
    since: Since = None,
    until: Until = None,
    by: FromQuery[SpendPeriod] = "month",
    group: FromQuery[SpendGroup] = "account",
) -> Response[SpendReport]:
    """Spend of all accounts by day or month, and by account, model or provider.

    `from` and `to` are those of `GET /account/usage`. Days are kept for 400 days; a month adds up its days that are in
    the range. By account, a row has only money, and a report by day has at most 31 days. `Accept: text/csv` returns
    CSV.
    """
    span = await _read_range(store, by, since, until)
    name = f"spend-by-{by}.csv"
    if group == "account":
        return await _report(request, read_spend_by_account(store, by, **span), ACCOUNT_COLUMNS, name)
    return await _report(request, read_usage(store, None, by, group, **span), columns_of(group), name)


@get("/accounts/{account_id:str}/usage", errors=[RequestMalformed, NotFound])
async def show_account_usage(
    any_account: AnyAccount,
    request: Request[Any, Any, State],
    store: Injected[Store],
    since: Since = None,
    until: Until = None,
    by: FromQuery[Period | None] = None,
    group: FromQuery[Group | None] = None,
    app: FromQuery[str | None] = None,
) -> Response[UsageReport]:
    """Requests, tokens and money of an account, by hour, day or month.

    The parameters are those of `GET /account/usage`. `Accept: text/csv` returns CSV.
    """
    return await report_usage(any_account.id, request, store, since, until, by, group, app)


@get("/accounts/{account_id:str}/requests", errors=[RequestMalformed, NotFound])
async def list_account_requests(
    any_account: AnyAccount,
    store: Injected[Store],
    limit: Annotated[int, QueryParameter(ge=1, le=LOGGED_REQUESTS)] = 50,
    app: FromQuery[str | None] = None,
    code: Code = None,
    before: FromQuery[str | None] = None,
) -> list[RequestRow]:
    """The last requests to an account's apps, newest first.

    `app` (its name) and `code` filter the rows, as in `GET /account/requests`.
    """
    return await read_requests(store, any_account.id, RequestFilter(app or None, code=code), limit, before)


@get("/accounts/{account_id:str}/requests/figures", errors=[RequestMalformed, NotFound])
async def show_account_figures(
    any_account: AnyAccount,
    store: Injected[Store],
    app: FromQuery[str | None] = None,
    since: Since = None,
    until: Until = None,
) -> RequestFigures:
    """Figures of the logged requests to an account's apps, as in `GET /account/requests/figures`."""
    chosen = RequestFilter(app or None, span=parse_span(since, until, "from", "to"))
    return await read_figures(store, any_account.id, chosen)


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
    account_router(show_usage, list_requests, show_request_figures, show_request),
    operator_router(
        show_service_usage,
        show_spend,
        show_account_usage,
        list_account_requests,
        show_account_figures,
        list_account_deploys,
    ),
]
