"""Which browsers may read an answer: those at the app's own addresses.

Litestar's CORS is one list for a whole application and is skipped where no route matches, so this one is applied to
everything that leaves under /capsule/<app>/, errors and preflights included.
"""

from __future__ import annotations

import re

from gateway.accounts.records import App
from gateway.errors import Headers
from gateway.settings import Settings

EXPOSED = b"X-Request-Id, Retry-After, RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset"
VARY = (b"vary", b"Origin")
_TOKENS = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+( *, *[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")


def allowed(settings: Settings, app: App, origin: bytes) -> bool:
    """Compared whole, never by suffix or prefix."""
    host = f"{app.name}.{settings.apps_domain}"
    if origin == f"https://{host}".encode():
        return True
    if app.customDomainVerified and app.customDomain and origin == f"https://{app.customDomain}".encode():
        return True
    if settings.allow_private_addresses:
        return re.fullmatch(rb"http://%b(:[0-9]{1,5})?" % re.escape(host.encode()), origin) is not None
    return False


def readable(origin: bytes) -> Headers:
    """For an allowed origin."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
        VARY,
    ]


def preflight(origin: bytes, asked_headers: bytes | None, methods: bytes) -> Headers:
    headers = [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", methods),
        (b"access-control-max-age", b"7200"),
        (b"vary", b"Origin, Access-Control-Request-Headers"),
    ]
    if asked_headers and len(asked_headers) <= 4096 and _TOKENS.fullmatch(asked_headers.strip()):
        headers.append((b"access-control-allow-headers", asked_headers.strip()))
    return headers
