"""Hostile requests, which do not affect other clients."""

import pytest

from tests.support.accounts import App
from tests.support.raw_http import bearer, error_of, request, send
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_several_tokens(app: App) -> None:
    good, bad = bearer(app), "Authorization: Bearer x.y.z"
    for headers in ((good, bad), (bad, good), (good, "Authorization: Bearer " + app.token("ben"))):
        reply = await send(app.gateway.port, request(app.path, b'{"prompt":"x"}', *headers))
        assert error_of(reply) == (401, "TOKEN_INVALID")


async def test_several_origins(app: App) -> None:
    own, evil = f"Origin: {app.origin}", "Origin: https://evil.example"
    for headers in ((own, evil), (evil, own), (f"Origin: {app.origin}, https://evil.example",)):
        reply = await send(app.gateway.port, request(app.path, b'{"prompt":"x"}', bearer(app), *headers))
        assert error_of(reply) == (403, "ORIGIN_NOT_ALLOWED")
        assert reply
        assert not [h for h in reply.headers if h.startswith("access-control-")]


async def test_headers_in_several_lines(app: App) -> None:
    """Lines of a list are joined. A header that must be single is not trusted if it appears twice."""
    for lines in (("Accept: text/html", "Accept: text/event-stream"), ("Accept: text/event-stream", "Accept: */*")):
        reply = await send(app.gateway.port, request(app.path, b'{"prompt":"x"}', bearer(app), *lines))
        assert reply
        assert reply.headers["content-type"] == "text/event-stream"
    types = ("Content-Type: application/json", "Content-Type: image/png")
    for lines in (types, types[::-1]):
        reply = await send(app.gateway.port, request(app.path, b'{"prompt":"x"}', bearer(app), *lines))
        assert error_of(reply) == (400, "REQUEST_MALFORMED")


@pytest.mark.parametrize(
    "path",
    [
        "/capsule/../ai",
        "/capsule/{app}%2f..%2f{app}/ai",
        "/capsule/{app}%0d%0aX-Evil:%201/ai",
        "/capsule/{APP}/ai",
        "/capsule/%ff%fe/ai",
        "/capsule/" + "a" * 8000 + "/ai",
    ],
)
async def test_names_that_no_app_can_have(app: App, path: str) -> None:
    path = path.format(app=app.name, APP=app.name.upper())
    reply = await send(app.gateway.port, request(path, b'{"prompt":"x"}', bearer(app)))
    assert reply
    assert reply.status in (404, 400, 414)
    assert "x-evil" not in reply.headers
    if reply.status == 404 and reply.headers.get("content-type", "").startswith("application/json"):
        assert error_of(reply) == (404, "APP_NOT_FOUND")


async def test_other_methods(app: App) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "TRACE", "CORMORANT"):
        response = await app.gateway.http.request(method, app.path, headers=app.headers())
        assert response.status_code in (404, 405, 400, 501), method
    answered(await app.ask("x"))


async def test_unknown_paths_look_alike(app: App) -> None:
    calls = [("GET", path) for path in ("/nowhere", "/.env", "/capsule", "/%00")]
    for method, path in (*calls, ("POST", "/hooks/deploy/unknown-token")):
        response = await app.gateway.http.request(method, path)
        assert (response.status_code, response.text) == (404, "Not Found"), path
        assert response.headers["Content-Type"].startswith("text/plain")
        assert response.headers["X-Request-Id"]


async def test_a_request_id_from_the_client_is_ignored(app: App) -> None:
    for evil in ("x" * 5000, "a b;c\"'<script>"):
        response = await app.post({"prompt": ""}, headers=app.headers(**{"X-Request-Id": evil}))
        error = refused(response, 400, "REQUEST_MALFORMED")
        assert error["requestId"] != evil
