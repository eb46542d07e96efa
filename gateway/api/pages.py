"""Serves the public page, the dashboard and the operators' page, and logs in to the last two.

The dashboard's scripts read their data from the account API, with the session cookie.
"""

import contextlib
import html
import re
import time
from collections.abc import AsyncGenerator
from string import Template
from typing import Any

import msgspec
from litestar import Request, Response, delete, get, post, route
from litestar.datastructures import State
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import Stream
from litestar.types import Method

from gateway.accounts.access import CALLS
from gateway.accounts.openid import OpenId
from gateway.accounts.operators import Operators
from gateway.accounts.registry import Registry
from gateway.accounts.session_store import Person
from gateway.accounts.sessions import ACCOUNT, OPERATOR, Sessions
from gateway.accounts.viewers import Viewers
from gateway.api.assets import bundle_pages, file_response, html_response, page_text
from gateway.api.authentication import (
    CHECK,
    OPERATOR_SECURITY,
    close_session,
    end_with_right,
    find_access,
    open_session,
    operators_only,
)
from gateway.deploys.hooks import MAX_HOOKS, TRIGGERS_PER_MINUTE
from gateway.errors import (
    BackboneUnavailable,
    CsrfRefused,
    LoginsLimited,
    NotPermitted,
    RequestMalformed,
    Unauthorized,
    ViewersLimited,
)
from gateway.keys import REGISTRATIONS_KEY
from gateway.operations.overview import SnapshotFeed
from gateway.redis.client import Store
from gateway.services import Injected, ProcessState
from gateway.settings import NANO, PLANS, Settings
from gateway.settings.prices import tariff_at
from gateway.validation import Credential

HTML, FILE = "text/html", "application/octet-stream"
READ: list[Method] = ["GET", "HEAD"]
LOG_IN_ERRORS = [RequestMalformed, Unauthorized, NotPermitted, CsrfRefused, LoginsLimited, BackboneUnavailable]
LOG_OUT_ERRORS = [CsrfRefused, BackboneUnavailable]

# -- the public page -----------------------------------------------------------------------------------------


def _table_rows(rows: list[tuple[str, ...]]) -> str:
    cells = (f'<tr><th scope="row">{row[0]}{"".join(f"<td class=number>{cell}" for cell in row[1:])}' for row in rows)
    return "".join(cells)


OR_SIGN_IN = ' Some may be left for people who <a href="/dashboard">sign in</a>.'
EXAMPLE = '<a class="button" href="{}">Open the live example</a>'


def _euro_per_million(nano_euro: int) -> str:
    """Returns nano-euro per token as euro per million tokens, with at least two decimals."""
    euro = f"{nano_euro / 1000:.3f}"
    return f"€{euro.removesuffix('0')}"


def render(settings: Settings, *, open_today: bool) -> str:
    tariff = tariff_at(settings.tariffs, int(time.time() * 1000))
    offered = [(model, tariff.prices[model]) for model in settings.models]
    prices: list[tuple[str, ...]] = [
        (f"<code>{model}</code>", _euro_per_million(price.input), _euro_per_million(price.output))
        for model, price in offered
    ]
    plans: list[tuple[str, ...]] = [
        (
            plan.capitalize(),
            f"{settings.app_limits[plan]:,}",
            f"€{settings.daily_caps[plan] / NANO:.2f}",
            f"{settings.deploy_quotas[plan]:,}",
        )
        for plan in PLANS
    ]
    return Template(page_text("public")).substitute(
        prices=_table_rows(prices),
        priced_on=tariff.date,
        plans=_table_rows(plans),
        app_rate=settings.rate_limits.app,
        user_rate=settings.rate_limits.user,
        hooks=MAX_HOOKS,
        triggers=TRIGGERS_PER_MINUTE,
        registrations=settings.registrations_per_day,
        open="" if open_today else "hidden",
        closed="hidden" if open_today else "",
        or_sign_in=OR_SIGN_IN if settings.oidc_issuer else "",
        base_url=html.escape(settings.base_url),
        example=EXAMPLE.format(html.escape(settings.example_url)) if settings.example_url else "",
    )


async def may_register(settings: Settings, store: Store) -> bool:
    """Returns whether the page offers registration. True while Redis is unavailable: the registration decides."""
    counter = f"{REGISTRATIONS_KEY}:{time.strftime('%Y-%m-%d', time.gmtime())}"
    try:
        registered, anonymous = await store.get_all([counter, f"{counter}:anonymous"])
    except BackboneUnavailable:
        return True
    return int(registered or 0) < settings.registrations_per_day and (
        int(anonymous or 0) < settings.anonymous_registrations_per_day
    )


@route("/", http_method=READ, media_type=HTML, tags=["Pages"])
async def index(
    request: Request[Any, Any, State], settings: Injected[Settings], store: Injected[Store]
) -> Response[bytes]:
    """The public page."""
    await bundle_pages()
    return html_response(request, render(settings, open_today=await may_register(settings, store)))


@route("/pages/{file:str}", http_method=READ, media_type=FILE, tags=["Pages"])
async def bundled_file(request: Request[Any, Any, State], file: FromPath[str]) -> Response[bytes]:
    """A style sheet, a script, an image or a font of the pages."""
    await bundle_pages()
    return file_response(request, file)


# -- the dashboard -------------------------------------------------------------------------------------------


@route("/dashboard", http_method=READ, media_type=HTML, tags=["Pages"])
async def dashboard(request: Request[Any, Any, State], openid: Injected[OpenId]) -> Response[bytes]:
    """The account's dashboard."""
    await bundle_pages()
    return html_response(request, offer_sign_in(page_text("dashboard"), openid))


def offer_sign_in(page: str, openid: OpenId) -> str:
    """Shows the page's button to sign in, if there is a provider."""
    return SIGN_IN.sub(r"\1>", page) if openid.enabled else page


SIGN_IN = re.compile(r'(<a class="button main" href="/dashboard/sign-in[^"]*"|<p class="or small quiet") hidden>')


class LogIn(msgspec.Struct, forbid_unknown_fields=True):
    apiKey: Credential


@post("/dashboard/session", status_code=204, tags=["Pages"], errors=LOG_IN_ERRORS)
async def log_in(
    request: Request[Any, Any, State], data: JSONBody[LogIn], registry: Injected[Registry], sessions: Injected[Sessions]
) -> Response[None]:
    """Log in with an API key.

    Exchanges the key for a cookie, so that no script of the page keeps the key. The session may do what the key may;
    keys for deploys or for one app open none.
    """
    async with sessions.attempt(request):
        key = await registry.api_keys.identify(data.apiKey)
        access = await find_access(key, registry) if key else None
        if key is None or access is None:
            raise Unauthorized("This API key is not valid.")
        access.require(CALLS["GET /account"])
    return await open_session(sessions, ACCOUNT, str(key))


@delete("/dashboard/session", tags=["Pages"], errors=[RequestMalformed, *LOG_OUT_ERRORS])
async def log_out(
    request: Request[Any, Any, State], sessions: Injected[Sessions], everywhere: FromQuery[bool] = False
) -> Response[None]:
    """Log out.

    With `everywhere`, all sessions of the same person or API key end.
    """
    if everywhere and (subject := await sessions.read_subject(request, ACCOUNT)):
        await sessions.close_all(subject)
    return await close_session(sessions, ACCOUNT, request)


# -- the operators' page ---------------------------------------------------------------------------------------


STREAM_SECONDS = 600.0  # after which the browser reconnects, and the credential is checked again


@route("/ops", http_method=READ, media_type=HTML, tags=["Pages"])
async def ops_page(request: Request[Any, Any, State], openid: Injected[OpenId]) -> Response[bytes]:
    """Show the operators' page."""
    await bundle_pages()
    return html_response(request, offer_sign_in(page_text("ops"), openid))


@get(
    "/ops/events",
    media_type="text/event-stream",
    guards=[operators_only],
    tags=["Pages"],
    security=OPERATOR_SECURITY,
    errors=[ViewersLimited],
)
async def ops_events(
    request: Request[Any, Any, State],
    feed: Injected[SnapshotFeed],
    figure_viewers: Injected[Viewers],
    process: Injected[ProcessState],
) -> Stream:
    """Stream the figures of the operators' page, every two seconds.

    The response is a stream of server-sent events. The event `away` means that Redis does not answer.
    """

    async def events() -> AsyncGenerator[bytes]:
        until = time.monotonic() + STREAM_SECONDS
        async with contextlib.aclosing(feed.stream_events()) as snapshots:
            async for event in snapshots:
                yield event
                if process.draining or time.monotonic() > until:
                    return

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    stream = figure_viewers.open("", request.scope["state"][CHECK].caller.name, end_with_right(request, events()))
    return Stream(stream, media_type="text/event-stream", headers=headers)


class OperatorLogIn(msgspec.Struct, forbid_unknown_fields=True):
    token: Credential


@post("/ops/session", status_code=204, tags=["Pages"], errors=LOG_IN_ERRORS)
async def operator_log_in(
    request: Request[Any, Any, State],
    data: JSONBody[OperatorLogIn],
    sessions: Injected[Sessions],
    operators: Injected[Operators],
) -> Response[None]:
    """Log in with the operator token.

    Exchanges the token for a cookie, so that no script of the page has to keep the token.
    """
    async with sessions.attempt(request):
        operator = operators.find(data.token)
        if operator is None:
            raise Unauthorized("This is not an operator token.")
    return await open_session(sessions, OPERATOR, operator.subject)


@delete("/ops/session", tags=["Pages"], errors=LOG_OUT_ERRORS)
async def operator_log_out(request: Request[Any, Any, State], sessions: Injected[Sessions]) -> Response[None]:
    """Log out.

    For an operator who signed in, this ends their session at the dashboard too, because it is the same.
    """
    signed_in = Person.parse(await sessions.read_subject(request, ACCOUNT)) is not None
    cookie = ACCOUNT if signed_in and not sessions.read_token(request, OPERATOR) else OPERATOR
    return await close_session(sessions, cookie, request)


ROUTES = [index, bundled_file, dashboard, log_in, log_out, ops_page, ops_events, operator_log_in, operator_log_out]
