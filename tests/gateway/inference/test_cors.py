"""CORS: the app's own pages, and no others, may read any answer."""

import httpx
import pytest

from gateway.accounts.records import App as Record
from gateway.accounts.records import Domain
from gateway.inference.cors import is_allowed
from gateway.settings import Settings
from tests.fakes import FakeProvider
from tests.fakes.provider import answer, tokens
from tests.support.accounts import App
from tests.support.responses import refused

session = pytest.mark.asyncio(loop_scope="session")

EXPOSED = {
    *("x-request-id", "retry-after", "x-should-retry"),
    *("ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"),
}
PRODUCTION = {
    "https://shop.apps.example": True,
    "https://own.example.org": True,
    "https://pending.example.org": False,
    "https://www.own.example.org": False,
    "http://own.example.org": False,
    "https://own.example.org:444": False,
    "https://shop.apps.example.evil.example": False,
    "https://evil-shop.apps.example": False,
    "https://shop-preview.apps.example": False,
    "https://shop.apps.example:8443": False,
    "https://user@shop.apps.example": False,
    "http://shop.apps.example.evil.example:8000": False,
    "http://shop.apps.example:8000@evil.example": False,
    "http://shop.apps.example": False,
    "http://shop.apps.example:5173": False,
    "null": False,
}
DEVELOPMENT = PRODUCTION | {"http://shop.apps.example": True, "http://shop.apps.example:5173": True}


@pytest.mark.parametrize(("private", "origins"), [(False, PRODUCTION), (True, DEVELOPMENT)])
def test_the_apps_origins(private: bool, origins: dict[str, bool]) -> None:
    settings = Settings(apps_domain="apps.example", allow_private_addresses=private)
    domains = (Domain("own.example.org", verified=True), Domain("pending.example.org", verified=False))
    app = Record(id="app_1", name="shop", account="acc_1", createdAt="", domains=domains)
    assert {origin: is_allowed(settings, app, origin.encode()) for origin in origins} == origins


def readable(response: httpx.Response, origin: str) -> None:
    headers = response.headers
    assert headers["Access-Control-Allow-Origin"] == origin
    assert "origin" in headers["Vary"].lower()
    exposed = {name.strip().lower() for name in headers["Access-Control-Expose-Headers"].split(",")}
    assert exposed >= EXPOSED
    assert headers["X-Request-Id"]


def unreadable(response: httpx.Response) -> None:
    assert not [name for name in response.headers if name.lower().startswith("access-control-")]


async def post(app: App, origin: str, body: object = None, path: str = "", **headers: str) -> httpx.Response:
    return await app.post(body or {"prompt": "x"}, path=path, headers={**app.headers(Origin=origin), **headers})


async def preflight(app: App, origin: str, path: str = "", asked: str = "authorization,content-type") -> httpx.Response:
    headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}
    return await app.gateway.http.options(app.path + path, headers={"Origin": origin, **headers})


@session
async def test_the_apps_own_page_reads_answers_and_errors(app: App, provider: FakeProvider) -> None:
    streamed = {"prompt": provider.plays(tokens("x")), "stream": True}
    for response, status in (
        (await post(app, app.origin, streamed), 200),
        (await post(app, app.origin), 200),
        (await post(app, app.origin, Authorization=""), 401),
        (await post(app, app.origin, {"prompt": ""}), 400),
        (await post(app, app.origin, {"prompt": "x" * 200_000}), 413),
        (await post(app, app.origin, {"prompt": provider.plays(answer(500))}), 502),
        (await post(app, app.origin, path="/nothing-here"), 404),
        (await app.gateway.http.put(app.path, headers={"Origin": app.origin}), 405),
    ):
        assert response.status_code == status
        readable(response, app.origin)
    while (limited := await post(app, app.origin, {"prompt": ""})).status_code != 429:
        assert limited.status_code == 400
    readable(limited, app.origin)
    refused(limited, 429, "USER_RATE_LIMITED")


@session
async def test_other_pages(app: App) -> None:
    for origin in ("https://evil.example", "x" * 5000):
        response = await post(app, origin)
        refused(response, 403, "ORIGIN_NOT_ALLOWED")
        unreadable(response)
        unreadable(await preflight(app, origin))


@session
async def test_options_without_an_origin(app: App) -> None:
    """As at every other address, the answer lists the methods."""
    answer = await app.gateway.http.options(app.path)
    assert (answer.status_code, answer.headers["Allow"]) == (204, "POST, OPTIONS")
    unreadable(answer)
    refused(await app.gateway.http.options("/capsule/nobody-here/ai"), 404, "APP_NOT_FOUND")


@session
@pytest.mark.parametrize("path", ["", "/models"])
async def test_preflight(app: App, path: str) -> None:
    asked = "authorization,content-type,x-stainless-lang,x-whatever"
    response = await preflight(app, app.origin, path, asked)
    assert response.status_code in (200, 204)
    headers = response.headers
    assert headers["Access-Control-Allow-Origin"] == app.origin
    assert {"POST", "GET"} & {m.strip() for m in headers["Access-Control-Allow-Methods"].split(",")}
    allowed = {h.strip().lower() for h in headers["Access-Control-Allow-Headers"].split(",")}
    assert allowed >= set(asked.split(","))
    assert "origin" in headers["Vary"].lower()
    assert headers["X-Request-Id"]


@session
async def test_pages_may_not_read_other_routes(app: App) -> None:
    http = app.gateway.http
    for path in ("/account", "/capabilities", "/health", "/platform/inference"):
        unreadable(await http.get(path, headers={"Origin": app.origin}))
