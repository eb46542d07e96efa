"""The operators' API: what the service or one account used, and an account's last requests and deploys.

The routes of an account answer as those of the account itself. Operators see no more of its requests than the account
does: neither prompts nor answers.
"""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, Response, get
from litestar.datastructures import State
from litestar.params import FromPath, FromQuery, QueryParameter

from gateway.accounts.operator_routes import require_account
from gateway.deploys.routes import DeployView, view_deploys
from gateway.errors import NotFound, RequestMalformed
from gateway.operations.snapshot import Hour
from gateway.process import Injected
from gateway.telemetry.usage import LOGGED_REQUESTS
from gateway.telemetry.usage_reports import Group, Period, RequestFilter, RequestRow, read_requests
from gateway.telemetry.usage_routes import UsageReport, report_usage


@get("/usage", errors=[RequestMalformed])
async def show_service_usage(gateway: Injected, hours: Annotated[int, QueryParameter(ge=1, le=336)] = 24) -> list[Hour]:
    """Requests, error codes and money of all accounts by hour, oldest first.

    The last entry is the current hour. Two weeks are kept.
    """
    return await gateway.overview.read_hours(hours)


@get("/accounts/{account_id:str}/usage", errors=[RequestMalformed, NotFound])
async def show_account_usage(
    account_id: FromPath[str],
    request: Request[Any, Any, State],
    gateway: Injected,
    since: Annotated[str | None, QueryParameter(name="from")] = None,
    until: Annotated[str | None, QueryParameter(name="to")] = None,
    by: FromQuery[Period | None] = None,
    group: FromQuery[Group | None] = None,
    app: FromQuery[str | None] = None,
) -> Response[UsageReport]:
    """Requests, tokens and money of an account, by hour or day.

    The parameters are those of `GET /account/usage`. `Accept: text/csv` returns CSV.
    """
    await require_account(account_id, gateway)
    return await report_usage(account_id, request, gateway, since, until, by, group, app)


@get("/accounts/{account_id:str}/requests", errors=[RequestMalformed, NotFound])
async def list_account_requests(
    account_id: FromPath[str],
    gateway: Injected,
    limit: Annotated[int, QueryParameter(ge=1, le=LOGGED_REQUESTS)] = 50,
    app: FromQuery[str | None] = None,
    code: Annotated[str | None, QueryParameter(pattern=r"^[A-Z_]+$")] = None,
    before: FromQuery[str | None] = None,
) -> list[RequestRow]:
    """The last requests to an account's apps, newest first.

    `app` (its name) and `code` filter the rows, as in `GET /account/requests`.
    """
    await require_account(account_id, gateway)
    return await read_requests(gateway.store, account_id, RequestFilter(app or None, code=code), limit, before)


@get("/accounts/{account_id:str}/deploys", errors=[RequestMalformed, NotFound])
async def list_account_deploys(
    account_id: FromPath[str],
    gateway: Injected,
    app: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=1000)] = 50,
    before: FromQuery[str] = "",
) -> list[DeployView]:
    """List an account's deploys, newest first."""
    await require_account(account_id, gateway)
    return await view_deploys(await gateway.deploys.list(account_id, app, limit, before), gateway)


# For the router in `routes.py`.
HANDLERS = [show_service_usage, show_account_usage, list_account_requests, list_account_deploys]
