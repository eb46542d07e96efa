"""CORS: the app's own pages, and no others, may read any answer."""

import httpx
import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import answer, tokens
from tests.support.accounts import DOMAIN, App
from tests.support.gateway_process import Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXPOSED = {
    *("x-request-id", "retry-after", "x-should-retry"),
    *("ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"),
}


def readable(response: httpx.Response, origin: str) -> None:
    headers = response.headers
    assert headers["Access-Control-Allow-Origin"] == origin
    assert "origin" in headers["Vary"].lower()
    exposed = {name.strip().lower() for name in headers["Access-Control-Expose-Headers"].split(",")}
    assert exposed >= EXPOSED
    assert headers["X-Request-Id"]


def unreadable(response: httpx.Response) -> None:
    assert not [name for name in response.headers if name.lower().startswith("access-control-")]


async def post(app: App, origin: str | None, body: object = None, path: str = "", **headers: str) -> httpx.Response:
    headers = {**app.headers(), **headers} | ({} if origin is None else {"Origin": origin})
    return await app.post(body or {"prompt": "x"}, path=path, headers=headers)


async def preflight(app: App, origin: str, path: str = "", asked: str = "authorization,content-type") -> httpx.Response:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    if asked:
        headers["Access-Control-Request-Headers"] = asked
    return await app.gateway.http.options(app.path + path, headers=headers)


async def test_the_apps_own_page_reads_answers(app: App, provider: FakeProvider) -> None:
    for stream in (True, False):
        response = await post(app, app.origin, {"prompt": provider.plays(tokens("x")), "stream": stream})
        assert response.status_code == 200
        readable(response, app.origin)


async def test_the_apps_own_page_reads_errors(app: App, provider: FakeProvider) -> None:
    failing = provider.plays(answer(500))
    for response, status in (
        (await post(app, app.origin, Authorization=""), 401),
        (await post(app, app.origin, {"prompt": ""}), 400),
        (await post(app, app.origin, {"prompt": "x" * 200_000}), 413),
        (await post(app, app.origin, {"prompt": failing}), 502),
        (await post(app, app.origin, path="/nothing-here"), 404),
        (await app.gateway.http.put(app.path, headers={"Origin": app.origin}), 405),
    ):
        assert response.status_code == status
        readable(response, app.origin)
    while (limited := await post(app, app.origin, {"prompt": ""})).status_code != 429:
        assert limited.status_code == 400
    readable(limited, app.origin)
    refused(limited, 429, "USER_RATE_LIMITED")


@pytest.mark.parametrize(
    "origin",
    [
        "https://{app}.{domain}.evil.example",
        "https://evil-{app}.{domain}",
        "https://{app}-preview.{domain}",
        "https://{app}.{domain}:8443",
        "https://user@{app}.{domain}",
        "http://{app}.{domain}.evil.example:8000",
        "http://{app}.{domain}:8000@evil.example",
        "x" * 5000,
    ],
)
async def test_other_pages(app: App, origin: str) -> None:
    origin = origin.format(app=app.name, domain=DOMAIN)
    response = await post(app, origin)
    refused(response, 403, "ORIGIN_NOT_ALLOWED")
    unreadable(response)
    unreadable(await preflight(app, origin))


async def test_options_without_an_origin(app: App) -> None:
    """As at every other address, the answer lists the methods."""
    answer = await app.gateway.http.options(app.path)
    assert (answer.status_code, answer.headers["Allow"]) == (204, "POST, OPTIONS")
    unreadable(answer)
    refused(await app.gateway.http.options("/capsule/nobody-here/ai"), 404, "APP_NOT_FOUND")


async def test_development_allows_the_app_over_http(app: App) -> None:
    for origin in (f"http://{app.name}.{DOMAIN}", f"http://{app.name}.{DOMAIN}:5173"):
        response = await post(app, origin)
        assert response.status_code == 200
        readable(response, origin)
        assert (await preflight(app, origin)).headers["Access-Control-Allow-Origin"] == origin


async def test_production_does_not_allow_the_app_over_http(strict: Gateway, backend: FakeAppBackend) -> None:
    secret = "thirty-two bytes at the very least"
    app = await strict.app(backend, auth={"kind": "secret", "secret": secret})
    headers = {"Authorization": "Bearer " + app.token(alg="HS256", key=secret)}
    assert (await post(app, app.origin, **headers)).status_code == 200
    for origin in (f"http://{app.name}.{DOMAIN}", f"http://{app.name}.{DOMAIN}:5173"):
        refused(await post(app, origin, **headers), 403, "ORIGIN_NOT_ALLOWED")


async def test_custom_domains(gw: Gateway, backend: FakeAppBackend) -> None:
    domain = "shop.example.org"
    verified = await gw.app(backend, customDomain=domain, customDomainVerified=True)
    pending = await gw.app(backend, customDomain=domain, customDomainVerified=False)
    for origin in (verified.origin, f"https://{domain}"):
        response = await post(verified, origin)
        assert response.status_code == 200
        readable(response, origin)
    for app, origin in (
        (pending, f"https://{domain}"),
        (verified, f"https://www.{domain}"),
        (verified, f"http://{domain}"),
        (verified, f"https://{domain}:444"),
    ):
        response = await post(app, origin)
        refused(response, 403, "ORIGIN_NOT_ALLOWED")
        unreadable(response)


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


async def test_pages_may_not_read_other_routes(app: App) -> None:
    http = app.gateway.http
    for path in ("/account", "/capabilities", "/health", "/platform/inference"):
        unreadable(await http.get(path, headers={"Origin": app.origin}))
