"""Unknown addresses below an app's `/ai/` get a 404 in JSON that explains the likely mistake."""

import pytest

from gateway.inference.handler import explain_missing
from tests.support.accounts import App
from tests.support.prices import PRICES
from tests.support.responses import refused

HINTS = {
    "v1/chat/completions": "Leave out '/v1'",
    "v1": "Leave out '/v1'",
    "": "Leave out the slash",
    "chat/completions/": "Leave out the slash",
    "models/": "Leave out the slash",
    "models/gpt-5": ", ".join(PRICES),
    "responses/": "Leave out the slash",
    "responses/resp_1": "No answer is stored",
    "responses/resp_1/cancel": "No answer is stored",
    "completions": "chat completions",
    "embeddings": "Only text",
    "images/generations": "Only text",
    "cormorant": "POST /ai/responses",
}


@pytest.mark.parametrize("path", HINTS)
def test_hints(path: str) -> None:
    assert HINTS[path] in explain_missing(path, PRICES)
    assert "cormorant" not in explain_missing(path, PRICES)


@pytest.mark.asyncio(loop_scope="session")
async def test_an_unknown_address_below_ai(app: App) -> None:
    """A browser's preflight passes, so that the page can read the explanation."""
    http, origin = app.gateway.http, {"Origin": app.origin}
    for path in ("/responses/resp_1", "/v1/chat/completions", "/embeddings", "/", "/models/gpt-5"):
        for method in ("GET", "POST"):
            response = await http.request(method, app.path + path, headers=app.headers(**origin))
            assert refused(response, 404, "NOT_FOUND")["message"] == explain_missing(path[1:], PRICES)
            assert response.headers["Access-Control-Allow-Origin"] == app.origin
        asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        preflight = await http.options(app.path + path, headers=asked)
        assert preflight.status_code == 204
        assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    evil = {"Origin": "https://evil.example"}
    response = await http.post(app.path + "/responses/resp_1", headers=evil)
    refused(response, 404, "NOT_FOUND")
    assert "Access-Control-Allow-Origin" not in response.headers
    refused(await http.options(app.path + "/responses/resp_1", headers=evil), 403, "ORIGIN_NOT_ALLOWED")
    beside = await http.post(app.path + "x", headers=app.headers())
    assert (beside.status_code, beside.text) == (404, "Not Found")
