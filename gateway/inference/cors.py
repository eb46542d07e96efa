"""CORS: only browser pages at the app's own addresses may read an answer.

Litestar's CORS has one list for a whole application, and does not apply if no route matches. The handler therefore adds
these headers itself to every response under /capsule/<app>/, including errors and preflights.
"""

import re
from urllib.parse import urlsplit

from gateway.accounts.records import App
from gateway.errors import Headers
from gateway.settings import Settings

EXPOSED_HEADERS = b"X-Request-Id, Retry-After, X-Should-Retry, RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset"
VARY = (b"vary", b"Origin")
MAX_REQUESTED_BYTES = 4_096  # of Access-Control-Request-Headers in a preflight
_HEADER_NAMES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+( *, *[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")


def is_allowed(settings: Settings, app: App, origin: bytes) -> bool:
    """Returns whether the origin is one of the app's. Compares whole origins, never a suffix or prefix."""
    host = f"{app.name}.{settings.apps_domain}"
    if origin == f"https://{host}".encode():
        return True
    if any(origin == f"https://{domain}".encode() for domain in app.verified_domains):
        return True
    if settings.allow_private_addresses:
        if origin == settings.apps_url.replace("{host}", host).encode():
            return True
        return re.fullmatch(rb"http://%b(:[0-9]{1,5})?" % re.escape(host.encode()), origin) is not None
    return False


def is_own(settings: Settings, origin: bytes, host: bytes) -> bool:
    """Returns whether the origin is the service's own, whose pages call apps with test tokens only.

    `host` is the request's Host, because operators may reach the pages at other addresses than the public one.
    """
    parts = urlsplit(settings.base_url)
    return origin in (f"{parts.scheme}://{parts.netloc}".encode(), b"http://" + host, b"https://" + host)


def response_headers(origin: bytes) -> Headers:
    """Returns the headers for an allowed origin."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED_HEADERS),
        VARY,
    ]


def preflight_headers(origin: bytes, requested: bytes | None, methods: bytes) -> Headers:
    """Returns the headers for an allowed origin; `requested` is the value of Access-Control-Request-Headers."""
    headers = [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", methods),
        (b"access-control-max-age", b"7200"),
        (b"vary", b"Origin, Access-Control-Request-Headers"),
    ]
    if requested and len(requested) <= MAX_REQUESTED_BYTES and _HEADER_NAMES.fullmatch(requested.strip()):
        headers.append((b"access-control-allow-headers", requested.strip()))
    return headers
