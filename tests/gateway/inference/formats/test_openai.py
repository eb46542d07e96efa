"""The OpenAI format, through the real SDK: `base_url` is the app's address, `api_key` the user's JWT."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, answer, call_part, calls, chunk, tokens
from tests.fakes.server import CLOSE, HANG
from tests.gateway.inference.formats.bodies import MODEL, PATH, json_bytes, sdk, user
from tests.support.accounts import App
from tests.support.prices import PRICES, cost, max_cost
from tests.support.responses import counted, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def client(app: App) -> AsyncIterator[openai.AsyncOpenAI]:
    async with sdk(app) as client:
        yield client


async def test_a_whole_answer(app: App, client: openai.AsyncOpenAI, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("Bon", "jour ☀", usage=(7, 3)))
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=user(prompt))
    assert raw.headers["X-Request-Id"]
    assert int(raw.headers["RateLimit-Limit"]) == 20
    completion = raw.parse()
    assert completion.object == "chat.completion"
    assert completion.id
    assert completion.created
    assert completion.model == MODEL
    (choice,) = completion.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", "Bonjour ☀")
    assert completion.usage
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (7, 3)
    assert completion.usage.total_tokens == 10
    assert await app.account.settled() == cost(7, 3)


CHARGED: dict[str, tuple[list[Any], int | None]] = {
    "cut after text": ([ROLE, chunk("a"), chunk("b"), CLOSE], None),
    "broken, with its usage": ([ROLE, chunk("a"), chunk(finish="error"), chunk(usage=(5, 2)), DONE], cost(5, 2)),
    "too long": ([ROLE, *[chunk("x" * 600_000)] * 2, HANG], None),
}


@pytest.mark.parametrize("case", CHARGED)
async def test_a_failure_that_was_charged_is_not_retried(app: App, provider: FakeProvider, case: str) -> None:
    """Each of three requests would cost its maximum, and none would answer."""
    script, charged = CHARGED[case]
    prompt = provider.plays(script)
    async with sdk(app, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model=MODEL, messages=user(prompt))
    assert caught.value.code == "PROVIDER_ERROR"
    assert len(provider.asked(prompt)) == 1
    assert await app.account.settled() == (max_cost(prompt) if charged is None else charged)
    response = await app.ask(prompt, stream=False)
    refused(response, 502, "PROVIDER_ERROR")
    assert response.headers["X-Should-Retry"] == "false"


async def test_a_failure_that_cost_nothing_is_retried(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(answer(500))
    async with sdk(app, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model=MODEL, messages=user(prompt))
    assert len(provider.asked(prompt)) == 3
    assert await app.account.settled() == 0


@pytest.mark.parametrize("include_usage", [True, False, None])
async def test_a_stream(
    app: App, client: openai.AsyncOpenAI, provider: FakeProvider, include_usage: bool | None
) -> None:
    prompt = provider.plays(tokens("Bon", "jour ☀", usage=(7, 3)))
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    stream = await client.chat.completions.create(model=MODEL, messages=user(prompt), stream=True, **options)
    chunks = [c async for c in stream]
    assert all(c.object == "chat.completion.chunk" and c.id and c.created for c in chunks)
    assert {c.model for c in chunks} == {MODEL}
    choices = [c.choices[0] for c in chunks if c.choices]
    assert "".join(c.delta.content or "" for c in choices) == "Bonjour ☀"
    assert [c.finish_reason for c in choices if c.finish_reason] == ["stop"]
    usages = [c.usage for c in chunks if c.usage]
    assert [(u.prompt_tokens, u.completion_tokens) for u in usages] == ([(7, 3)] if include_usage else [])
    if include_usage:
        assert chunks[-1].choices == []
    assert await app.account.settled() == cost(7, 3)


async def test_the_model_that_answers_is_named(app: App, client: openai.AsyncOpenAI, provider: FakeProvider) -> None:
    """It is also the model whose price is charged."""
    other, unknown = "llama-3.3-70b-instruct", "gpt-5-by-mistake"
    for answering, named in ((other, other), (unknown, MODEL)):
        prompt = provider.plays(tokens("Bon", "jour", usage=(7, 3), model=answering))
        before = await app.account.settled()
        completion = await client.chat.completions.create(model=MODEL, messages=user(prompt))
        assert completion.model == named
        stream = await client.chat.completions.create(
            model=MODEL, messages=user(prompt), stream=True, stream_options={"include_usage": True}
        )
        chunks = [c async for c in stream]
        assert {c.model for c in chunks} == {named}
        assert len({c.id for c in chunks}) == 1
        assert await app.account.settled() - before == 2 * cost(7, 3, named)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_is_relayed(client: openai.AsyncOpenAI, provider: FakeProvider, field: str) -> None:
    prompt = provider.plays(ROLE, chunk(**{field: "Hmm"}), chunk(**{field: ", well"}), tokens("Yes"))
    stream = await client.chat.completions.create(model=MODEL, messages=user(prompt), stream=True)
    deltas = [c.choices[0].delta async for c in stream if c.choices]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "Hmm, well"
    assert "".join(d.content or "" for d in deltas) == "Yes"


async def test_models(app: App, client: openai.AsyncOpenAI) -> None:
    listed = [m async for m in client.models.list()]
    assert {m.id for m in listed} == PRICES.keys()
    for model in listed:
        assert model.object == "model"
        assert await client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError, match="gpt-oss-120b"):
        await client.models.retrieve("gpt-5")
    one = app.path + "/models/gpt-oss-120b"
    for path in (one, app.path + "/models"):
        refused(await app.gateway.http.get(path), 401, "TOKEN_MISSING")
        refused(await app.gateway.http.get(path, headers=app.headers("x.y.z")), 401, "TOKEN_INVALID")
    refused(await app.gateway.http.post(one, headers=app.headers()), 405, "METHOD_NOT_ALLOWED")
    assert counted(await app.ask("How many are left?"))[1] == 19, "listing models counts against no limit"


async def test_the_sdks_errors(app: App) -> None:
    async with sdk(app, "not.a.token") as client:
        with pytest.raises(openai.AuthenticationError) as refusal:
            await client.chat.completions.create(model=MODEL, messages=user("Hello"))
        assert refusal.value.code == "TOKEN_INVALID"
    async with sdk(app) as client:
        with pytest.raises(openai.BadRequestError) as fault:
            await client.chat.completions.create(model="gpt-5", messages=user("Hello"))
        assert fault.value.code == "MODEL_NOT_ALLOWED"
        assert fault.value.request_id


# -- tools -----------------------------------------------------------------------------------------------------

PARAMETERS = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_tools_round_trip(app: App, provider: FakeProvider, stream: bool) -> None:
    """The model calls it in pieces, the client runs it, and the model answers.

    The SDK repeats the model's message with a null in each field that was absent. `make check-clients` does the same
    with the newest release of each client that the documentation names.
    """
    begin = [call_part(0, id="call_1", name="weather", arguments=""), call_part(0, arguments='{"city": ')]
    rest = call_part(0, arguments='"Zürich"}')
    other = call_part(1, id="call_2", name="weather", arguments='{"city": "Bern"}')
    parts = (rest, other) if stream else (other, rest)  # the SDK's streams do not read mixed parts
    prompt, result = provider.plays(calls(*begin, *parts)), provider.plays(tokens("It", " rains."))
    messages: list[Any] = user(prompt)
    async with sdk(app) as client:

        async def ask() -> Any:
            asked: Any = {"model": MODEL, "messages": messages, "tools": [TOOL]}
            if not stream:
                return (await client.chat.completions.create(**asked)).choices[0].message
            async with client.chat.completions.stream(**asked) as events:
                return (await events.get_final_completion()).choices[0].message

        message = await ask()
        messages.append(message.model_dump())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": result} for call in message.tool_calls]
        assert (await ask()).content == "It rains."
    (first,), (second,) = provider.asked(prompt), provider.asked(result)
    assert second.json["tools"] == first.json["tools"]
    asking, assistant, *results = second.json["messages"]
    assert [asking] == user(prompt)
    called = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in assistant["tool_calls"]]
    assert [(*names, json.loads(arguments)) for *names, arguments in called] == [
        ("call_1", "weather", {"city": "Zürich"}),
        ("call_2", "weather", {"city": "Bern"}),
    ]
    assert results == messages[2:]
    assert await app.account.settled() == cost(9, 4) + cost(7, 3)


@pytest.mark.parametrize(("finish", "arguments"), [("length", ""), ("tool_calls", "{}")])
async def test_a_call_that_was_cut_before_its_arguments(
    app: App, provider: FakeProvider, finish: str, arguments: str
) -> None:
    """With `{}` for arguments, clients would run it."""
    cut = call_part(0, id="call_1", name="delete_all", arguments="")
    prompt = provider.plays([ROLE, cut, chunk(finish=finish), chunk(usage=(9, 4)), DONE])
    body: Any = {"messages": user(prompt), "tools": [TOOL]}
    (choice,) = (await app.post(body, path=PATH)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == (arguments, finish)
    async with sdk(app) as client:
        chunks = await client.chat.completions.create(**body, model=MODEL, stream=True)
        choices = [part.choices[0] async for part in chunks]
    streamed = [call.function.arguments for choice in choices for call in choice.delta.tool_calls or ()]
    assert ("".join(streamed), choices[-1].finish_reason) == (arguments, finish)
    assert await app.account.settled() == 2 * cost(9, 4)


async def test_text_and_calls_in_one_answer(app: App, provider: FakeProvider) -> None:
    both = chunk("Let me look. ", tool_calls=[{"index": 0, **CALL}])
    prompt = provider.plays([ROLE, both, chunk(finish="tool_calls"), chunk(usage=(9, 4)), DONE])
    body = {"messages": user(prompt), "tools": [TOOL]}
    message = (await app.post(body, path=PATH)).json()["choices"][0]["message"]
    assert (message["content"], message["tool_calls"]) == ("Let me look. ", [CALL])
    events = (await app.post(body | {"stream": True}, path=PATH)).text
    assert events.index('"content":"Let me look. "') < events.index('"id":"call_1"')


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_part_of_a_call_costs_the_maximum_after_a_cut(app: App, provider: FakeProvider, stream: bool) -> None:
    prompt = provider.plays(ROLE, call_part(0, id="call_1", name="weather", arguments=""), CLOSE)
    body = {"messages": user(prompt), "tools": [TOOL], "stream": stream}
    response = await app.post(body, path=PATH)
    assert "PROVIDER_ERROR" in response.text
    assert "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 502)
    assert await app.account.settled() == max_cost(prompt + "x" * json_bytes([TOOL]))
