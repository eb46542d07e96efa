"""The page for unknown addresses: browsers get it, and all others what they always got."""

import pytest

from tests.support.gateway_process import Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
TITLE = "There is no page at this address"


async def test_a_browser_gets_a_page(gw: Gateway) -> None:
    """And HEAD the same headers."""
    for path in ("/account/nothing", "/pages/nothing.css", "/%3Cscript%3E"):
        answer = await gw.http.get(path, headers={"Accept": BROWSER})
        assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert TITLE in answer.text
        assert "script" not in answer.text  # nothing of the address is repeated
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["cache-control"] == "no-store"
        assert "x-request-id" in answer.headers
        head = await gw.http.head(path, headers={"Accept": BROWSER})
        assert (head.status_code, head.content) == (404, b"")
        assert head.headers["content-length"] == answer.headers["content-length"] == str(len(answer.content))


async def test_errors_of_the_api_stay_json(gw: Gateway) -> None:
    """And clients that are no browsers, or do not read, get a line."""
    refused(await gw.http.get("/account", headers={"Accept": BROWSER}), 401, "UNAUTHORIZED")
    refused(await gw.http.delete("/health", headers={"Accept": BROWSER}), 405, "METHOD_NOT_ALLOWED")
    for method, path, accept in (
        *(("GET", "/nothing", accept) for accept in ("*/*", "application/json", "", "application/xhtml+xml")),
        ("POST", "/nothing", BROWSER),
        ("GET", "/capsule/nobody/nothing", BROWSER),
    ):
        answer = await gw.http.request(method, path, headers={"Accept": accept})
        assert (answer.status_code, answer.text) == (404, "Not Found"), (method, path, accept)
