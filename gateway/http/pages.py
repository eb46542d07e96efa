"""Serves the public page and the dashboard, and logs in to the dashboard.

The dashboard's scripts read their data from the account API, with the session cookie.
"""

from __future__ import annotations

import html
import mimetypes
import time
from pathlib import Path
from string import Template
from typing import Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.datastructures import State
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, JSONBody

from gateway.accounts.keys import REGISTRATIONS_KEY
from gateway.accounts.sessions import ACCOUNT
from gateway.bounds import Credential
from gateway.deploys.hooks import MAX_HOOKS, TRIGGERS_PER_MINUTE
from gateway.errors import BackboneUnavailable, CsrfRefused, LoginsLimited, RequestMalformed, Unauthorized
from gateway.http.authentication import close_session, open_session
from gateway.inference.spend.prices import PRICED_ON, PRICES
from gateway.process import Gateway, Injected
from gateway.settings import NANO, PLANS, Settings

HTML, FILE = "text/html", "application/octet-stream"
LOG_IN_ERRORS = [RequestMalformed, Unauthorized, CsrfRefused, LoginsLimited, BackboneUnavailable]
LOG_OUT_ERRORS = [CsrfRefused, BackboneUnavailable]

PAGES = Path(__file__).parents[1] / "pages"
DASHBOARD, PUBLIC, SHARED = PAGES / "dashboard", PAGES / "public", PAGES / "shared"
PUBLIC_FILES = ("public.css", "public.js")  # the page itself is a template
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Browsers must not mix script modules of two releases in one page.
    "cache-control": "no-cache",
}


def page_file(folder: Path, name: str) -> Response[bytes]:
    """Returns a file of a folder of pages. Raises NotFoundException."""
    # The name is only compared with existing files: as a path, it could leave the folder.
    path = next((path for path in folder.iterdir() if path.name == name and path.is_file()), None)
    if path is None:
        raise NotFoundException
    # Fixed, because the table of the machine may differ, and with nosniff a module of another type does not run.
    media_type = {".js": "text/javascript"}.get(path.suffix) or mimetypes.guess_type(name)[0]
    return Response(path.read_bytes(), media_type=media_type, headers=HEADERS)


# -- the public page -----------------------------------------------------------------------------------------


def _table_rows(rows: list[tuple[str, ...]]) -> str:
    cells = (f'<tr><th scope="row">{row[0]}{"".join(f"<td class=number>{cell}" for cell in row[1:])}' for row in rows)
    return "".join(cells)


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
    return Template((PUBLIC / "index.html").read_text()).substitute(
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
    )


async def may_register(gateway: Gateway) -> bool:
    """Returns whether the page offers registration. True while Redis is unavailable: the registration decides."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    try:
        registered = await gateway.store.get(f"{REGISTRATIONS_KEY}:{day}")
    except BackboneUnavailable:
        return True
    return int(registered or 0) < gateway.settings.registrations_per_day


@get("/", media_type=HTML, tags=["Pages"])
async def index(gateway: Injected) -> Response[str]:
    """The public page."""
    return Response(render(gateway.settings, open_today=await may_register(gateway)), headers=HEADERS)


@get("/pages/{file:str}", media_type=FILE, tags=["Pages"], sync_to_thread=False)
def shared_file(file: FromPath[str]) -> Response[bytes]:
    """A shared file of the pages."""
    return page_file(PUBLIC if file in PUBLIC_FILES else SHARED, file)


# -- the dashboard -------------------------------------------------------------------------------------------


@get("/dashboard", media_type=HTML, tags=["Pages"], sync_to_thread=False)
def dashboard() -> Response[bytes]:
    """The account's dashboard."""
    return page_file(DASHBOARD, "index.html")


@get("/dashboard/{file:str}", media_type=FILE, tags=["Pages"], sync_to_thread=False)
def dashboard_file(file: FromPath[str]) -> Response[bytes]:
    """A file of the dashboard."""
    return page_file(DASHBOARD, file)


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


ROUTES = [index, shared_file, dashboard, dashboard_file, log_in, log_out]
