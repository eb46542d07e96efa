"""Small pages of one message, such as the one that browsers get in place of a bare "Not Found".

They need no other file, so they can be served before the pages are bundled. Caddy serves one for unknown hosts of apps.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from string import Template

TEMPLATE = Path(__file__).with_name("shared") / "error.html"


def wants_page(method: str, accept: str) -> bool:
    """Returns whether a request is that of a browser that opens a page. Scripts and API clients rarely name HTML."""
    return method in ("GET", "HEAD") and "text/html" in accept.lower()


def render_error_page(title: str, text: str, link: str = "") -> str:
    """Renders the page. The arguments are HTML."""
    return Template(TEMPLATE.read_text()).substitute(title=title, text=text, link=link)


@cache
def render_not_found() -> tuple[bytes, dict[str, str]]:
    """Returns the page for an unknown address, and its headers."""
    page, headers = render_page(
        "There is no page at this address",
        "The address may be mistyped, or the page may have moved.",
        '<p><a href="/">Go to the home page</a></p>',
    )
    return page, {**headers, "vary": "Accept"}


def render_page(title: str, text: str, link: str, *, form_action: str = "'none'") -> tuple[bytes, dict[str, str]]:
    """Returns a page and its headers.

    The arguments are HTML. `form_action` names the addresses to which a form in `link` leads, as in the policy
    (https://www.w3.org/TR/CSP3/#directive-form-action), those of redirects too.
    """
    page = render_error_page(title, text, link)
    style = re.search("<style>(.*?)</style>", page, re.DOTALL)
    assert style
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    return page.encode(), {
        "content-security-policy": f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; "
        f"form-action {form_action}; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
