"""The pool of connections to the provider, whose answers fail or are late.

Before the first token, the response has the failure's status and costs nothing. After it, the stream ends with an error
event and costs the maximum. test_dialects.py and test_connection.py have more of the ways in which an answer breaks.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from gateway.inference.provider.pool import Provider, pause_between_sweeps
from gateway.settings import Settings
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, MODEL, ROLE, answer, chunk, event, tokens
from tests.fakes.server import CLOSE, HANG, Head, Script
from tests.support.accounts import App
from tests.support.background import in_background
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import cost, max_cost
from tests.support.responses import failed, refused, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_number_of_idle_connections_is_limited() -> None:
    """After a burst, connections beyond the limit are closed. The next request uses the most recently used one."""
    async with FakeProvider() as fake:
        settings = Settings(provider_url=fake.url, provider_key=fake.key)
        provider = Provider(settings, settings.providers[0], max_idle=2)
        burst = [await provider.connect() for _ in range(3)]
        for connection in burst:
            provider.keep(connection)
        assert [connection.is_usable() for connection in burst] == [True, True, False]
        assert [await provider.connect() for _ in range(2)] == [burst[1], burst[0]]
        provider.close()


NESTED = {"error": {"message": "kaputt, cormorant", "type": "server_error", "code": 500}}
QUOTA = {"error": {"message": "You exceeded your current quota, check your billing", "code": "insufficient_quota"}}
# What the provider sends, and the status and code of the answer.
BEFORE: dict[str, tuple[Script, int, str]] = {
    "status 422": (answer(422, NESTED), 400, "PROVIDER_REFUSED"),
    "status 403": (answer(403, NESTED), 502, "PROVIDER_ERROR"),
    "quota": (answer(429, QUOTA), 503, "PROVIDER_QUOTA_EXHAUSTED"),
    "rate": (answer(429, {"error": {"message": "Rate limit reached"}}), 503, "PROVIDER_QUOTA_EXHAUSTED"),
    "a page instead of a stream": (answer(200, b"<html>", {"Content-Type": "text/html"}), 502, "PROVIDER_ERROR"),
    "closed before an answer": ([CLOSE], 502, "PROVIDER_UNREACHABLE"),
    "cut after a usage": ([ROLE, chunk(usage=(5, 5)), CLOSE], 502, "PROVIDER_ERROR"),
    "error inside the stream": ([ROLE, event(NESTED), DONE], 502, "PROVIDER_ERROR"),
}


@pytest.mark.parametrize(("case", "stream"), [*((case, True) for case in BEFORE), ("rate", False)])
async def test_before_a_token(app: App, provider: FakeProvider, case: str, stream: bool) -> None:
    script, status, code = BEFORE[case]
    prompt = provider.plays(script)
    response = await app.ask(prompt, stream=stream)
    error = refused(response, status, code)
    assert "cormorant" not in error["message"]
    assert ("Retry-After" in response.headers) == (code == "PROVIDER_UNREACHABLE" or case == "rate")
    if case == "rate":
        assert int(response.headers["Retry-After"]) >= 1
    if case.startswith("status"):
        logged = await app.gateway.request_line(error["requestId"])
        assert (logged["code"], logged["status"], logged["nano_euro"]) == (code, status, 0)
        assert logged["provider_status"] == int(case.removeprefix("status "))
    assert len(provider.asked(prompt)) == 1, "no retry once a byte may have reached the provider"
    assert await app.account.settled() == 0


AFTER: dict[str, Script] = {
    "cut": [CLOSE],
    "nested error": [event(NESTED), DONE],
}


@pytest.mark.parametrize("case", AFTER)
async def test_after_a_token(app: App, provider: FakeProvider, case: str) -> None:
    prompt = provider.plays(ROLE, chunk("Gu"), chunk("ten"), *AFTER[case])
    events = await app.events(prompt)
    assert text_of(events) == "Guten"
    assert failed(events) == "PROVIDER_ERROR"
    assert "cormorant" not in events[-1].data
    assert await app.account.settled() == max_cost(prompt)
    # A whole answer that cannot be completed has the status of its failure, and no part of the text.
    response = await app.ask(prompt)
    assert response.status_code == 502
    assert "Guten" not in response.text
    assert await app.account.settled() == 2 * max_cost(prompt)
    assert len(provider.asked(prompt)) == 2


async def test_usage_before_a_failure_is_charged(app: App, provider: FakeProvider) -> None:
    """That of a cut after a token, and of an answer that says that it broke, even before a token."""
    cut = provider.plays(chunk("a", usage=(5, 1)), chunk("b", usage=(5, 2)), CLOSE)
    assert failed(await app.events(cut)) == "PROVIDER_ERROR"
    assert await app.account.settled() == cost(5, 2)
    broken = provider.plays(ROLE, chunk(finish="abort"), chunk(usage=(5, 2)), DONE)
    refused(await app.ask(broken), 502, "PROVIDER_ERROR")
    assert await app.account.settled() == 2 * cost(5, 2)


async def test_huge_usage_is_settled_and_logged(app: App, provider: FakeProvider) -> None:
    """This holds even for a usage of 10^400, which no float can represent."""
    prompt = provider.plays(tokens("a", usage=(10**400, 1)))
    for stream in (False, True):
        before = await app.account.settled()
        response = await app.ask(prompt, stream=stream)
        assert response.status_code == 200
        assert await app.account.settled() - before == max_cost(prompt)
        logged = await app.gateway.request_line(response.headers["X-Request-Id"])
        assert (logged["event"], logged["code"], logged["nano_euro"]) == ("request", "", max_cost(prompt))
        assert logged["input_tokens"] == 10**9


@module_fixture
async def lively(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    settings = {
        "GATEWAY_KEEP_ALIVE": "0.3",
        "GATEWAY_PROVIDER_TIMEOUTS": "connect=1,first=2,idle=2,total=10",
    }
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("lively"), **settings) as gw:
        yield gw


@pytest.mark.parametrize("sent", [[], [Head()], [ROLE], [ROLE, chunk("Gu")]], ids=["no", "head", "role", "token"])
async def test_silence(lively: Gateway, backend: FakeAppBackend, provider: FakeProvider, sent: Script) -> None:
    app = await lively.app(backend)
    prompt = provider.plays(sent, HANG)
    began = time.monotonic()
    refused(await app.ask(prompt), 504, "PROVIDER_TIMEOUT")
    assert 1.5 < time.monotonic() - began < 8, "before the limit of a whole answer"
    await asyncio.wait_for(provider.asked(prompt)[0].canceled.wait(), PATIENCE_SECONDS)
    begun = len(sent) == 2
    assert await app.account.settled() == (max_cost(prompt) if begun else 0)
    if begun:
        events = await app.events(prompt)
        assert (text_of(events), failed(events)) == ("Gu", "PROVIDER_TIMEOUT")
        await asyncio.wait_for(provider.asked(prompt)[1].canceled.wait(), PATIENCE_SECONDS)
        assert await app.account.settled() == 2 * max_cost(prompt)


async def test_the_openai_keep_alive_is_an_empty_delta(
    lively: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    app = await lively.app(backend)

    async def lines(prompt: str) -> list[str]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": True}
        response = await app.post(body, path="/chat/completions")
        return [line for line in response.text.split("\n") if line]

    late, hanging = provider.plays(ROLE, 1.2, tokens("late")), provider.plays(HANG)
    got, failing = await asyncio.gather(lines(late), lines(hanging))
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


# -- the sweep -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limits", "pause"), [((30, 30, 300, 15), 0.5), ((30, 4, 300, 15), 0.2), ((1, 0.5, 2.5), 0.1)])
async def test_long_limits_need_few_sweeps(limits: tuple[float, ...], pause: float) -> None:
    """With 2,000 silent streams, ten sweeps per second would take 4 % of a core."""
    assert pause_between_sweeps(*limits) == pause


async def test_the_time_for_which_the_process_stood_still_is_late() -> None:
    """It is not the provider's silence: what has arrived in it is unread."""

    class Ticks(list[tuple[float, float]]):
        def tick(self, seconds: float, limits: object, keep_alive: float, late: float) -> None:
            self.append((seconds, late))

    settings = Settings(provider_url="http://127.0.0.1:1/v1", provider_key="k", keep_alive=2.0)
    provider, ticks = Provider(settings, settings.providers[0]), Ticks()
    provider.streams = [ticks]  # type: ignore[assignment]
    async with in_background(provider.sweep()):
        await wait_until(lambda: len(ticks) >= 2)
        time.sleep(1.2)
        await wait_until(lambda: any(late for _, late in ticks))
    *before, (seconds, late) = ticks
    assert not any(late for _, late in before)
    assert seconds >= 1.2
    assert seconds - late == pytest.approx(0.1)
