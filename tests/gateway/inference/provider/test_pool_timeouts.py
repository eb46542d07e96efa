"""A slow provider: deadlines, and keep-alives while a client waits. Settings shorten the times."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.inference.provider.pool import pause_between_sweeps
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import MODEL, ROLE, chunk, tokens
from tests.fakes.server import HANG, Head
from tests.support.accounts import App
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import PATIENCE_SECONDS
from tests.support.prices import max_cost
from tests.support.responses import failed, refused, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

OTHER = "qwen3.6-35b-a3b"  # the provider answers with it, and it has a price


@module_fixture
async def lively(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    settings = {
        "GATEWAY_KEEP_ALIVE": "0.3",
        "GATEWAY_PROVIDER_TIMEOUTS": "connect=1,first=2,idle=2,total=10",
    }
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("lively"), **settings) as gw:
        yield gw


async def lines(app: App, prompt: str, *, gate: asyncio.Event | None = None) -> list[str]:
    """Returns the lines of the stream. After three of them, sets the gate, for which the provider may wait."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": True}
    http, got, path = app.gateway.http, [], app.path + "/chat/completions"
    async with http.stream("POST", path, json=body, headers=app.headers()) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                got.append(line)
            if len(got) == 3 and gate is not None:
                gate.set()
    return got


async def test_no_token_in_time(lively: Gateway, backend: FakeAppBackend, provider: FakeProvider) -> None:
    """A stream then has had keep-alives, so that its failure is an event."""
    app = await lively.app(backend)

    async def too_late(*head: Any) -> None:
        prompt = provider.plays(*head, HANG)
        started = time.monotonic()
        refused(await app.ask(prompt), 504, "PROVIDER_TIMEOUT")
        assert 1.5 < time.monotonic() - started < 8, "before the limit of a whole answer"
        await asyncio.wait_for(provider.asked(prompt)[0].canceled.wait(), PATIENCE_SECONDS)

    await asyncio.gather(too_late(), too_late(Head()), too_late(ROLE))
    assert await app.account.settled() == 0


async def test_silence_in_the_middle(lively: Gateway, backend: FakeAppBackend, provider: FakeProvider) -> None:
    app = await lively.app(backend)
    prompt = provider.plays(ROLE, chunk("Gu"), HANG)
    began = time.monotonic()
    events = await app.events(prompt)
    assert (text_of(events), failed(events)) == ("Gu", "PROVIDER_TIMEOUT")
    assert await app.account.settled() == max_cost(prompt)
    refused(await app.ask(prompt), 504, "PROVIDER_TIMEOUT")
    assert time.monotonic() - began < 10, "before the limit of a whole answer"
    for asked in provider.asked(prompt):
        await asyncio.wait_for(asked.canceled.wait(), PATIENCE_SECONDS)


async def test_the_openai_keep_alive_is_an_empty_delta(
    lively: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    app, gate = await lively.app(backend), asyncio.Event()
    late, hanging = provider.plays(ROLE, gate, tokens("late")), provider.plays(HANG)
    got, failing = await asyncio.gather(lines(app, late, gate=gate), lines(app, hanging))
    assert all(line.startswith("data: ") for line in got), "some parsers choke on comments"
    assert got.pop() == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in got]
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    text = [delta.get("content") for delta in deltas]
    assert [t for t in text if t] == ["late"]
    # At least two keep-alives, in addition to the role.
    assert len(text[: text.index("late")]) >= 3
    assert json.loads(failing[-1].removeprefix("data: "))["error"]["code"] == "PROVIDER_TIMEOUT"


async def test_the_first_token_counts_after_a_keep_alive_too(
    lively: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    """The time to it is recorded, and the chunks name the model that answers, even after a keep-alive."""
    app = await lively.app(backend)
    role, a, b, *end = tokens("a", "b", model=OTHER)
    prompt = provider.plays(role, 0.6, a, 0.1, b, 0.1, *end)
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": True}
    response = await app.post(body, path="/chat/completions")
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    named = [c["model"] for c in chunks if c["choices"] and c["choices"][0]["delta"].get("content")]
    assert named == [OTHER, OTHER]
    assert 500 < (await lively.request_line(response.headers["X-Request-Id"]))["ttft_ms"] < 3_000


# -- the sweep -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limits", "pause"), [((30, 30, 300, 15), 0.5), ((30, 4, 300, 15), 0.2), ((1, 0.5, 2.5), 0.1)])
async def test_long_limits_need_few_sweeps(limits: tuple[float, ...], pause: float) -> None:
    """With 2,000 silent streams, ten sweeps per second would take 4 % of a core."""
    assert pause_between_sweeps(*limits) == pause
