"""The page for unknown addresses: browsers get it, and all others what they always got."""

import pytest

from tests.support.gateway_process import Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
TITLE = "There is no page at this address"


@pytest.mark.parametrize("path", ["/nothing", "/account/nothing", "/pages/nothing.css", "/%3Cscript%3E", "/a/b/c"])
async def test_a_browser_gets_a_page(gw: Gateway, path: str) -> None:
    answer = await gw.http.get(path, headers={"Accept": BROWSER})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert TITLE in answer.text
    assert "script" not in answer.text  # nothing of the address is repeated
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    assert "x-request-id" in answer.headers


async def test_head_has_the_same_headers(gw: Gateway) -> None:
    got, head = [await gw.http.request(method, "/nothing", headers={"Accept": BROWSER}) for method in ("GET", "HEAD")]
    assert (head.status_code, head.content) == (404, b"")
    assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.content))


@pytest.mark.parametrize("accept", ["*/*", "application/json", "text/*", "", "text/plain", "application/xhtml+xml"])
async def test_other_clients_get_a_line(gw: Gateway, accept: str) -> None:
    answer = await gw.http.get("/nothing", headers={"Accept": accept})
    assert (answer.status_code, answer.text) == (404, "Not Found")


async def test_only_reading_gets_a_page(gw: Gateway) -> None:
    answer = await gw.http.post("/nothing", headers={"Accept": BROWSER})
    assert (answer.status_code, answer.text) == (404, "Not Found")


async def test_errors_of_the_api_stay_json(gw: Gateway) -> None:
    refused(await gw.http.get("/account", headers={"Accept": BROWSER}), 401, "UNAUTHORIZED")
    refused(await gw.http.delete("/health", headers={"Accept": BROWSER}), 405, "METHOD_NOT_ALLOWED")
    unknown = await gw.http.get("/capsule/nobody/nothing", headers={"Accept": BROWSER})
    assert (unknown.status_code, unknown.text) == (404, "Not Found")
