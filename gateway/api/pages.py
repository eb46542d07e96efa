"""Pages for people: the public page, the dashboard's files, and logging in to it.

What a page shows of an account it fetches from the account surface, with the session's cookie.
"""

from __future__ import annotations

import html
import mimetypes
from pathlib import Path
from string import Template
from typing import Any

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.datastructures import State
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, JSONBody

from gateway.accounts.sessions import ACCOUNT
from gateway.deploys.hooks import MAX_HOOKS, TRIGGERS_PER_MINUTE
from gateway.errors import Unauthorized
from gateway.inference.prices import PRICED_ON, PRICES
from gateway.process import Injected
from gateway.settings import NANO, PLANS, Settings

PAGES = Path(__file__).parents[1] / "pages"
DASHBOARD, PUBLIC, SHARED = PAGES / "dashboard", PAGES / "public", PAGES / "shared"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Modules of two releases must never meet in one page.
    "cache-control": "no-cache",
}


def page_file(folder: Path, name: str) -> Response[bytes]:
    """One of a page's own files. Raises NotFoundException."""
    # Looked up among those that are there: a name of the caller's never becomes a path.
    path = next((path for path in folder.iterdir() if path.name == name and path.is_file()), None)
    if path is None:
        raise NotFoundException
    # Not what the machine's own tables say: with nosniff a module of another type does not run.
    kind = {".js": "text/javascript"}.get(path.suffix) or mimetypes.guess_type(name)[0]
    return Response(path.read_bytes(), media_type=kind, headers=HEADERS)


def _rows(rows: list[tuple[str, str, str]]) -> str:
    return "".join(f'<tr><th scope="row">{a}<td class="number">{b}<td class="number">{c}' for a, b, c in rows)


def render(settings: Settings) -> str:
    # Nano-euro a token is a thousandth of a euro a million tokens.
    prices = [(f"<code>{m}</code>", f"€{p.input / 1000:.2f}", f"€{p.output / 1000:.2f}") for m, p in PRICES.items()]
    plans = [
        (plan.capitalize(), f"€{settings.daily_caps[plan] / NANO:.2f}", f"{settings.deploy_quotas[plan]:,}")
        for plan in PLANS
    ]
    return Template((PUBLIC / "index.html").read_text()).substitute(
        prices=_rows(prices),
        priced_on=PRICED_ON,
        plans=_rows(plans),
        app_rate=settings.rate_limits.app,
        user_rate=settings.rate_limits.user,
        hooks=MAX_HOOKS,
        triggers=TRIGGERS_PER_MINUTE,
        registrations=settings.registrations_per_day,
        base_url=html.escape(settings.base_url),
    )


@get("/", sync_to_thread=False)
def index(gateway: Injected) -> Response[str]:
    return Response(render(gateway.settings), media_type="text/html", headers=HEADERS)


@get("/pages/{file:str}", sync_to_thread=False)
def shared_file(file: FromPath[str]) -> Response[bytes]:
    return page_file(PUBLIC if file == "public.css" else SHARED, file)


# -- the dashboard -------------------------------------------------------------------------------------------


@get("/dashboard", sync_to_thread=False)
def dashboard() -> Response[bytes]:
    return page_file(DASHBOARD, "index.html")


@get("/dashboard/{file:str}", sync_to_thread=False)
def dashboard_file(file: FromPath[str]) -> Response[bytes]:
    return page_file(DASHBOARD, file)


class LogIn(msgspec.Struct, forbid_unknown_fields=True):
    apiKey: str


@post("/dashboard/session", status_code=204)
async def log_in(request: Request[Any, Any, State], data: JSONBody[LogIn], gateway: Injected) -> Response[None]:
    """Changes an API key for the dashboard's cookie, so that no script of a page ever keeps the key."""
    sessions = gateway.sessions
    # Another site's page must not log somebody in to an account of its own.
    sessions.require_own_origin(request)
    await sessions.attempt(request)
    account = await gateway.registry.account_by_key(data.apiKey)
    if account is None:
        raise Unauthorized("This API key is not known here.")
    await sessions.succeeded(request)
    return Response(None, cookies=[sessions.cookie(ACCOUNT, await sessions.open(account.id))])


@delete("/dashboard/session")
async def log_out(request: Request[Any, Any, State], gateway: Injected) -> Response[None]:
    sessions = gateway.sessions
    sessions.require_own_origin(request)
    await sessions.close(sessions.token_of(request, ACCOUNT))
    return Response(None, status_code=204, cookies=[sessions.cookie(ACCOUNT, "")])


ROUTES = [index, shared_file, dashboard, dashboard_file, log_in, log_out]
