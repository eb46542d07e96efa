"""Serves the public page and the dashboard, and logs in to the dashboard.

The dashboard's scripts read their data from the account API, with the session cookie.
"""

from __future__ import annotations

import html
import time
from string import Template
from typing import Any

import msgspec
from litestar import Request, Response, delete, post, route
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody
from litestar.types import Method

from gateway.accounts.keys import REGISTRATIONS_KEY
from gateway.accounts.sessions import ACCOUNT
from gateway.bounds import Credential
from gateway.deploys.hooks import MAX_HOOKS, TRIGGERS_PER_MINUTE
from gateway.errors import BackboneUnavailable, CsrfRefused, LoginsLimited, RequestMalformed, Unauthorized
from gateway.http.assets import bundle_pages, file_response, html_response, page_text
from gateway.http.authentication import close_session, open_session
from gateway.inference.spend.prices import PRICED_ON, PRICES
from gateway.process import Gateway, Injected
from gateway.settings import NANO, PLANS, Settings

HTML, FILE = "text/html", "application/octet-stream"
READ: list[Method] = ["GET", "HEAD"]
LOG_IN_ERRORS = [RequestMalformed, Unauthorized, CsrfRefused, LoginsLimited, BackboneUnavailable]
LOG_OUT_ERRORS = [CsrfRefused, BackboneUnavailable]

# -- the public page -----------------------------------------------------------------------------------------


def _table_rows(rows: list[tuple[str, ...]]) -> str:
    cells = (f'<tr><th scope="row">{row[0]}{"".join(f"<td class=number>{cell}" for cell in row[1:])}' for row in rows)
    return "".join(cells)


EXAMPLE = '<a class="button" href="{}">Open the live example</a>'


def render(settings: Settings, *, open_today: bool) -> str:
    # One nano-euro per token is a thousandth of a euro per million tokens.
    prices: list[tuple[str, ...]] = [
        (f"<code>{m}</code>", f"€{p.input / 1000:.2f}", f"€{p.output / 1000:.2f}") for m, p in PRICES.items()
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
        priced_on=PRICED_ON,
        plans=_table_rows(plans),
        app_rate=settings.rate_limits.app,
        user_rate=settings.rate_limits.user,
        hooks=MAX_HOOKS,
        triggers=TRIGGERS_PER_MINUTE,
        registrations=settings.registrations_per_day,
        open="" if open_today else "hidden",
        closed="hidden" if open_today else "",
        base_url=html.escape(settings.base_url),
        example=EXAMPLE.format(html.escape(settings.example_url)) if settings.example_url else "",
    )


async def may_register(gateway: Gateway) -> bool:
    """Returns whether the page offers registration. True while Redis is unavailable: the registration decides."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    try:
        registered = await gateway.store.get(f"{REGISTRATIONS_KEY}:{day}")
    except BackboneUnavailable:
        return True
    return int(registered or 0) < gateway.settings.registrations_per_day


@route("/", http_method=READ, media_type=HTML, tags=["Pages"])
async def index(request: Request[Any, Any, State], gateway: Injected) -> Response[bytes]:
    """The public page."""
    await bundle_pages()
    return html_response(request, render(gateway.settings, open_today=await may_register(gateway)))


@route("/pages/{file:str}", http_method=READ, media_type=FILE, tags=["Pages"])
async def bundled_file(request: Request[Any, Any, State], file: FromPath[str]) -> Response[bytes]:
    """A style sheet, a script, an image or a font of the pages."""
    await bundle_pages()
    return file_response(request, file)


# -- the dashboard -------------------------------------------------------------------------------------------


@route("/dashboard", http_method=READ, media_type=HTML, tags=["Pages"])
async def dashboard(request: Request[Any, Any, State]) -> Response[bytes]:
    """The account's dashboard."""
    await bundle_pages()
    return html_response(request, page_text("dashboard"))


class LogIn(msgspec.Struct, forbid_unknown_fields=True):
    apiKey: Credential


@post("/dashboard/session", status_code=204, tags=["Pages"], errors=LOG_IN_ERRORS)
async def log_in(request: Request[Any, Any, State], data: JSONBody[LogIn], gateway: Injected) -> Response[None]:
    """Log in with an API key.

    Exchanges the key for a cookie, so that no script of the page keeps the key.
    """
    async with gateway.sessions.attempt(request):
        key = await gateway.registry.api_keys.identify(data.apiKey)
        if key is None or await gateway.registry.account(key.account) is None:
            raise Unauthorized("This API key is not valid.")
    gateway.registry.api_keys.note_use(key)
    return await open_session(gateway, ACCOUNT, str(key))


@delete("/dashboard/session", tags=["Pages"], errors=LOG_OUT_ERRORS)
async def log_out(request: Request[Any, Any, State], gateway: Injected) -> Response[None]:
    """Log out."""
    return await close_session(gateway, ACCOUNT, request)


ROUTES = [index, bundled_file, dashboard, log_in, log_out]
