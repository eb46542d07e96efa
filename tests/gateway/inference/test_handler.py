"""The native format: the request, the whole answer, the stream, and their costs."""

import asyncio
import json

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, tokens
from tests.support.accounts import App
from tests.support.prices import PRICES, cost, max_cost
from tests.support.responses import answered, counted, ended, text_of

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
    body = answered(await app.ask(prompt, maxTokens=50))
    assert body["usage"] is None
    assert await app.account.settled() == max_cost(prompt, 50)
    assert ended(await app.events(prompt, maxTokens=50))["usage"] == body["usage"]
    assert await app.account.settled() == 2 * max_cost(prompt, 50)


async def test_reasoning_is_not_relayed(app: App, provider: FakeProvider) -> None:
    thought = [chunk(reasoning="Hmm, cormorant"), chunk(content=None, reasoning_content=" indeed, cormorant")]
    prompt = provider.plays(ROLE, thought, tokens("Yes"))
    response = await app.ask(prompt)
    assert answered(response)["text"] == "Yes"
    events = await app.events(prompt)
    assert text_of(events) == "Yes"
    assert "cormorant" not in response.text + "".join(e.data for e in events)
