"""The public page: what the service offers, its limits and prices, and what it does with people's data."""

from __future__ import annotations

import html
from pathlib import Path
from string import Template

from litestar import Response, get

from .deploys import TRIGGERS_A_MINUTE
from .prices import PRICED_ON, PRICES
from .process import Injected
from .settings import NANO, PLANS, Settings

PAGES = Path(__file__).parent / "pages"
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "public, max-age=300",
}


def _rows(rows: list[tuple[str, str, str]]) -> str:
    return "".join(f"<tr><td>{a}<td>{b}<td>{c}" for a, b, c in rows)


def render(settings: Settings) -> str:
    # Nano-euro a token is a thousandth of a euro a million tokens.
    prices = [(f"<code>{m}</code>", f"{p.input / 1000:.2f} €", f"{p.output / 1000:.2f} €") for m, p in PRICES.items()]
    plans = [
        (plan.capitalize(), f"{settings.daily_caps[plan] / NANO:.2f} €", f"{settings.deploy_quotas[plan]:,}")
        for plan in PLANS
    ]
    return Template((PAGES / "index.html").read_text()).substitute(
        prices=_rows(prices),
        priced_on=PRICED_ON,
        plans=_rows(plans),
        app_rate=settings.rate_limits.app,
        user_rate=settings.rate_limits.user,
        triggers=TRIGGERS_A_MINUTE,
        registrations=settings.registrations_per_day,
        base_url=html.escape(settings.base_url),
    )


@get("/", sync_to_thread=False)
def index(gateway: Injected) -> Response[str]:
    return Response(render(gateway.settings), media_type="text/html; charset=utf-8", headers=HEADERS)


@get("/pages/style.css", sync_to_thread=False)
def style() -> Response[bytes]:
    return Response((PAGES / "style.css").read_bytes(), media_type="text/css; charset=utf-8", headers=HEADERS)


ROUTES = [index, style]
