"""The native format and its costs, the order of refusals, hostile requests, unknown addresses, and a crash."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from gateway.inference.handler import Inference
from gateway.inference.request import InferenceRequest
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, tokens
from tests.fakes.server import CLOSE
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.prices import PRICES, cost, max_cost
from tests.support.raw_http import bearer, error_of, request, send
from tests.support.responses import answered, counted, ended, refused, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_whole_answer(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("Bon", "jour", " ☀", usage=(7, 3)))
    response = await app.ask(prompt)
    assert answered(response) == {
        "text": "Bonjour ☀",
        "model": "gpt-oss-120b",
        "finishReason": "stop",
        "usage": {"inputTokens": 7, "outputTokens": 3},
    }
    assert response.headers["Content-Type"].startswith("application/json")
    assert await app.account.settled() == cost(7, 3)


async def test_a_stream(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("Bon", "jour", " ☀\n\n", usage=(7, 3)))
    async with app.stream(prompt) as source:
        assert source.response.status_code == 200
        headers = source.response.headers
        assert headers["Content-Type"].split(";")[0] == "text/event-stream"
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Accel-Buffering"] == "no"
        assert "Content-Encoding" not in headers
        counted(source.response)
        events = [e async for e in source.aiter_sse()]
    assert [json.loads(e.data) for e in events[:-1]] == [{"token": t} for t in ("Bon", "jour", " ☀\n\n")]
    assert ended(events) == {
        "model": "gpt-oss-120b",
        "finishReason": "stop",
        "usage": {"inputTokens": 7, "outputTokens": 3},
    }
    assert await app.account.settled() == cost(7, 3)


@pytest.mark.parametrize(
    ("accept", "stream", "streams"),
    [
        ("text/event-stream", None, True),
        ("*/*", None, False),
        ("text/event-stream", False, False),
        ("application/json", True, True),
    ],
)
async def test_the_accept_header_chooses_unless_the_body_does(
    app: App, accept: str, stream: bool | None, streams: bool
) -> None:
    body = {"prompt": "Which form?"} | ({} if stream is None else {"stream": stream})
    response = await app.post(body, headers=app.headers(Accept=accept))
    assert response.status_code == 200
    assert response.headers["Content-Type"].startswith("text/event-stream") == streams


async def test_a_token_leaves_when_it_arrives(app: App, provider: FakeProvider) -> None:
    gates = [asyncio.Event() for _ in range(3)]
    script = [ROLE]
    for number, gate in enumerate(gates):
        script += [chunk(f"t{number}"), gate]
    prompt = provider.plays(script, chunk(finish="stop"), chunk(usage=(1, 3)), DONE)
    async with app.stream(prompt) as source:
        events = source.aiter_sse()
        for number, gate in enumerate(gates):
            event = await asyncio.wait_for(anext(events), 2)
            assert json.loads(event.data) == {"token": f"t{number}"}
            gate.set()
        assert ended([e async for e in events])["usage"] == {"inputTokens": 1, "outputTokens": 3}


async def test_the_request_to_the_provider(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("x"), prompt="Olé, what crosses the wire? 0x51")
    token = app.token()
    headers = app.headers(token, Cookie="session=browser", Origin=app.origin)
    body = {"prompt": prompt, "model": "qwen3.6-35b-a3b", "maxTokens": 77}
    assert (await app.post(body, headers=headers)).status_code == 200
    (asked,) = provider.asked(prompt)
    sent = asked.json
    assert sent["model"] == "qwen3.6-35b-a3b"
    assert sent["messages"] == [{"role": "user", "content": prompt}]
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}
    assert sent.get("max_tokens", sent.get("max_completion_tokens")) == 77
    assert asked.header("authorization") == f"Bearer {provider.key}"
    assert "application/json" in str(asked.header("content-type"))
    assert asked.header("accept-encoding") == "identity"
    everything = str(asked.headers) + asked.body.decode()
    for private in (token, "session=browser", app.origin, app.name, "ana"):
        assert private not in everything


@pytest.mark.parametrize("model", PRICES)
async def test_each_model_is_charged_at_its_price(app: App, provider: FakeProvider, model: str) -> None:
    prompt = provider.plays(tokens("x", usage=(11, 13), model=model))
    assert answered(await app.ask(prompt, model=model))["model"] == model
    assert await app.account.settled() == cost(11, 13, model)


@pytest.mark.parametrize("usage", [None, (-1, 5)])
async def test_missing_or_invalid_usage(app: App, provider: FakeProvider, usage: tuple | None) -> None:
    prompt = provider.plays(tokens("x", usage=usage))
    assert answered(await app.ask(prompt, maxTokens=50))["usage"] is None
    assert await app.account.settled() == max_cost(prompt, 50)
    assert ended(await app.events(prompt, maxTokens=50))["usage"] is None
    assert await app.account.settled() == 2 * max_cost(prompt, 50)


async def test_a_refusal(app: App, provider: FakeProvider) -> None:
    """The OpenAI format has a member for its text; in the native one only the finish reason tells it from an answer."""
    prompt = provider.plays(ROLE, chunk(refusal="No."), chunk(finish="stop"), chunk(usage=(7, 3)), DONE)
    body = answered(await app.ask(prompt))
    assert (body["text"], body["finishReason"]) == ("No.", "content_filter")
    events = await app.events(prompt)
    assert (text_of(events), ended(events)["finishReason"]) == ("No.", "content_filter")
    chat = {"messages": [{"role": "user", "content": prompt}]}
    choice = (await app.post(chat, path="/chat/completions")).json()["choices"][0]
    assert (choice["message"]["content"], choice["message"]["refusal"]) == (None, "No.")
    assert choice["finish_reason"] == "stop"
    assert '"refusal":"No."' in (await app.post({**chat, "stream": True}, path="/chat/completions")).text
    assert await app.account.settled() == 4 * cost(7, 3)


async def test_reasoning_is_not_relayed(app: App, provider: FakeProvider) -> None:
    thought = [chunk(reasoning="Hmm, cormorant"), chunk(content=None, reasoning_content=" indeed, cormorant")]
    prompt = provider.plays(ROLE, thought, tokens("Yes"))
    response = await app.ask(prompt)
    assert answered(response)["text"] == "Yes"
    events = await app.events(prompt)
    assert text_of(events) == "Yes"
    assert "cormorant" not in response.text + "".join(e.data for e in events)


EVIL = {"Origin": "https://evil.example"}
BODIES: dict[str, dict[str, Any]] = {
    "malformed": {"content": b"{"},
    "too large": {"content": b"x" * 150_000},
    "a picture": {"content": b"\x89PNG", "type": "image/png"},
    "unknown model": {"content": b'{"prompt":"x","model":"gpt-5"}'},
    "fine": {"content": b'{"prompt":"x"}'},
}


async def post(app: App, body: str, **headers: str) -> httpx.Response:
    fault = BODIES[body]
    headers = {"Content-Type": fault.get("type", "application/json"), **headers}
    return await app.post(content=fault["content"], headers=headers)


@pytest.mark.parametrize("body", BODIES)
async def test_app_then_origin_then_token(gw: Gateway, app: App, body: str) -> None:
    nobody = App(app.account, "nobody-here", app.backend)
    refused(await post(nobody, body, **EVIL), 404, "APP_NOT_FOUND")
    refused(await post(app, body, **EVIL, Authorization="Bearer x"), 403, "ORIGIN_NOT_ALLOWED")
    refused(await post(app, body), 401, "TOKEN_MISSING")
    refused(await post(app, body, Authorization="Bearer x"), 401, "TOKEN_INVALID")


async def test_token_then_app_rate_then_user_rate(app: App) -> None:
    for user, count in (("ana", 20), ("ben", 10)):
        for _ in range(count):
            refused(await app.post({}, headers=app.headers(app.token(user))), 400, "REQUEST_MALFORMED")
    for body in BODIES:
        refused(await post(app, body, Authorization="Bearer x"), 401, "TOKEN_INVALID")
        for user in ("ana", "ben", "eve"):
            refused(await post(app, body, **app.headers(app.token(user))), 429, "APP_RATE_LIMITED")


async def test_user_rate_then_cap_then_body(low_caps: Gateway, backend: FakeAppBackend, provider: FakeProvider) -> None:
    app = await low_caps.app(backend, "free")
    for _ in range(19):
        refused(await app.post({}), 400, "REQUEST_MALFORMED")
    filling = provider.plays(ROLE, chunk("x"), CLOSE, prompt="f" * 3744)
    assert max_cost(filling, 1000) == 1_200_000
    refused(await app.ask(filling, maxTokens=1000), 502, "PROVIDER_ERROR")
    assert await app.account.settled() == 1_200_000
    for body in BODIES:
        refused(await post(app, body, **app.headers()), 429, "USER_RATE_LIMITED")
        refused(await post(app, body, **app.headers(app.token("ben"))), 402, "SPEND_CAP_REACHED")


async def test_headers_in_several_lines(app: App) -> None:
    """Lines of a list are joined. A header that must be single is not trusted if it appears twice."""
    good, bad, other = bearer(app), "Authorization: Bearer x.y.z", f"Authorization: Bearer {app.token('ben')}"
    own, evil = f"Origin: {app.origin}", "Origin: https://evil.example"
    text, image = "Content-Type: application/json", "Content-Type: image/png"
    for error, *several in (
        ((401, "TOKEN_INVALID"), (good, bad), (bad, good), (good, other)),
        ((403, "ORIGIN_NOT_ALLOWED"), (good, own, evil), (good, evil, own), (good, f"{own}, https://evil.example")),
        ((400, "REQUEST_MALFORMED"), (good, text, image), (good, image, text)),
    ):
        for lines in several:
            reply = await send(app.gateway.port, request(app.path, b'{"prompt":"x"}', *lines))
            assert error_of(reply) == error, lines
            assert reply
            assert not [header for header in reply.headers if header.startswith("access-control-")], lines
    for accept in (("Accept: text/html", "Accept: text/event-stream"), ("Accept: text/event-stream", "Accept: */*")):
        reply = await send(app.gateway.port, request(app.path, b'{"prompt":"x"}', good, *accept))
        assert reply
        assert reply.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize(
    "path",
    ["/capsule/../ai", "/capsule/{app}%2f..%2f{app}/ai", "/capsule/{app}%0d%0aX-Evil:%201/ai", "/capsule/%ff%fe/ai"],
)
async def test_names_that_no_app_can_have(app: App, path: str) -> None:
    reply = await send(app.gateway.port, request(path.format(app=app.name), b'{"prompt":"x"}', bearer(app)))
    assert reply
    assert reply.status in (404, 400)
    assert "x-evil" not in reply.headers
    upper = await send(app.gateway.port, request(f"/capsule/{app.name.upper()}/ai", b'{"prompt":"x"}', bearer(app)))
    assert error_of(upper) == (404, "APP_NOT_FOUND")


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


async def test_an_unknown_address_below_ai(app: App) -> None:
    """A browser's preflight passes, so that the page can read the explanation."""
    http, origin = app.gateway.http, {"Origin": app.origin}
    for path, hint in HINTS.items():
        response = await http.post(f"{app.path}/{path}", headers=app.headers(**origin))
        message = refused(response, 404, "NOT_FOUND")["message"]
        assert hint in message, path
        assert "cormorant" not in message
        assert response.headers["Access-Control-Allow-Origin"] == app.origin
    assert (await http.get(f"{app.path}/models/gpt-5", headers=app.headers())).status_code == 404
    asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = await http.options(f"{app.path}/embeddings", headers=asked)
    assert preflight.status_code == 204
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    evil = {"Origin": "https://evil.example"}
    response = await http.post(app.path + "/responses/resp_1", headers=evil)
    refused(response, 404, "NOT_FOUND")
    assert "Access-Control-Allow-Origin" not in response.headers
    refused(await http.options(app.path + "/responses/resp_1", headers=evil), 403, "ORIGIN_NOT_ALLOWED")
    beside = await http.post(app.path + "x", headers=app.headers())
    assert (beside.status_code, beside.text) == (404, "Not Found")


CONTENT = "Mandarine ardoise"


class Crashing(Inference):
    def __init__(self, after: int) -> None:
        self._traces, self._after = None, after

    async def _handle(self, call: InferenceRequest) -> None:
        if self._after:
            call.status = self._after
        raise ValueError(f"invalid literal: {CONTENT!r}") from KeyError(CONTENT)

    def _report(self, call: InferenceRequest) -> None:
        pass


@pytest.mark.parametrize("after", [0, 200])
async def test_a_crash_is_logged_without_the_text_of_its_exception(after: int) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/capsule/shop/ai", "headers": [], "state": {}}
    with capture_logs() as logged:
        if after:  # the stream has begun
            with pytest.raises(RuntimeError) as broken:
                await Crashing(after)(scope, None, send)
            assert broken.value.__suppress_context__
            assert CONTENT not in str(broken.value)
        else:
            await Crashing(after)(scope, None, send)
            assert sent[0]["status"] == 500
    (crash,) = [line for line in logged if line["event"] == "request.crashed"]
    assert crash["error"].startswith("ValueError at ")
    assert "test_handler.py" in crash["error"]
    assert CONTENT not in str(logged) + str(sent)
