"""The OpenAI format, through the real SDK: `base_url` is the app's address, `api_key` the user's JWT."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, answer, chunk, tokens
from tests.fakes.server import CLOSE, HANG
from tests.gateway.inference.formats.chat import MODEL, sdk, user
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
    assert all(m.object == "model" for m in listed)
    for _ in range(2):
        response = await app.gateway.http.get(app.path + "/models", headers=app.headers())
        assert response.status_code == 200
        assert response.headers["X-Request-Id"]
    _, remaining, _ = counted(await app.ask("How many are left?"))
    assert remaining == 19, "listing models counts against no limit"


async def test_one_model(app: App, client: openai.AsyncOpenAI) -> None:
    for listed in [m async for m in client.models.list()]:
        assert await client.models.retrieve(listed.id) == listed
    with pytest.raises(openai.NotFoundError, match="gpt-oss-120b"):
        await client.models.retrieve("gpt-5")
    one = app.path + "/models/gpt-oss-120b"
    for path in (one, app.path + "/models"):
        refused(await app.gateway.http.get(path), 401, "TOKEN_MISSING")
        refused(await app.gateway.http.get(path, headers=app.headers("x.y.z")), 401, "TOKEN_INVALID")
    refused(await app.gateway.http.post(one, headers=app.headers()), 405, "METHOD_NOT_ALLOWED")
    assert counted(await app.ask("How many are left?"))[1] == 19


async def test_the_sdks_errors(app: App, provider: FakeProvider) -> None:
    async def error(client: openai.AsyncOpenAI, prompt: str = "Hello", **fields: Any) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**{"model": MODEL, "messages": user(prompt), **fields})
        return caught.value

    async with sdk(app, "not.a.token") as client:
        failure = await error(client)
        assert isinstance(failure, openai.AuthenticationError)
        assert failure.code == "TOKEN_INVALID"
    async with sdk(app) as client:
        failure = await error(client, model="gpt-5")
        assert isinstance(failure, openai.BadRequestError)
        assert failure.code == "MODEL_NOT_ALLOWED"
        assert failure.request_id
        while not isinstance(failure, openai.RateLimitError):
            failure = await error(client, model="gpt-5")
        assert failure.code == "USER_RATE_LIMITED"
        assert 1 <= int(failure.response.headers["Retry-After"]) <= 60
