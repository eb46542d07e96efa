"""lib/ai.js as an app uses it: results, errors, and cancellation at the provider."""

import asyncio

import pytest

from tests.browser.conftest import Visit
from tests.browser.site import Site
from tests.browser.visitor import Visitor
from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, tokens
from tests.fakes.server import HANG, Script
from tests.support.gateway_process import App
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_stream_delivers_each_token_when_it_arrives(visitor: Visitor, provider: FakeProvider) -> None:
    go_on = asyncio.Event()
    prompt = provider.plays(ROLE, chunk("Bon"), go_on, chunk("jour"), chunk(finish="stop", usage=(1, 2)), DONE)
    asking = asyncio.create_task(visitor.ask(prompt))
    await wait_until(lambda: _has(visitor, ["Bon"]))
    go_on.set()
    answer = await asking
    assert (answer.text, answer.tokens) == ("Bonjour", ["Bon", "jour"])


async def test_on_done_gets_how_an_answer_ended(visitor: Visitor, provider: FakeProvider) -> None:
    prompt = provider.plays(ROLE, chunk("Bon"), chunk(finish="length"), chunk(usage=(5, 1)), DONE)
    await visitor.page.evaluate("window.ends = []")
    answer = await visitor.ask(prompt, "{ onDone: (end) => void ends.push([end, tokens.length]) }")
    assert answer.text == "Bon"
    [[end, tokens_before]] = await visitor.page.evaluate("window.ends")
    usage = {"inputTokens": 5, "outputTokens": 1}
    assert (end, tokens_before) == ({"model": end["model"], "finishReason": "length", "usage": usage}, 1)
    answer = await visitor.ask(prompt, "{ onDone: () => { throw new RangeError('mine') } }")
    assert answer.name == "RangeError"


@pytest.mark.parametrize("whole", ["true", "false"])
async def test_the_effort_of_thinking(visitor: Visitor, provider: FakeProvider, whole: str) -> None:
    prompt = provider.plays(tokens("x"))
    assert (await visitor.ask(prompt, f"{{ whole: {whole}, effort: 'low' }}")).text == "x"
    assert (await visitor.ask(prompt, f"{{ whole: {whole} }}")).text == "x"
    assert [exchange.json.get("reasoning_effort") for exchange in provider.asked(prompt)] == ["low", None]
    assert (await visitor.ask(prompt, f"{{ whole: {whole}, effort: 'none' }}")).code == "REQUEST_MALFORMED"


@pytest.mark.parametrize("whole", ["true", "false"])
async def test_an_answer_that_thinking_left_empty_is_an_error(
    visitor: Visitor, provider: FakeProvider, whole: str
) -> None:
    prompt = provider.plays(ROLE, chunk(reasoning_content="hm"), chunk(finish="length"), chunk(usage=(5, 200)), DONE)
    await visitor.page.evaluate("window.ends = []")
    answer = await visitor.ask(prompt, f"{{ whole: {whole}, onDone: (end) => void ends.push(end.finishReason) }}")
    assert (answer.text, answer.code, answer.known, answer.status) == (None, "ANSWER_EMPTY", True, None)
    assert answer.requestId
    assert "thinking" in answer.message
    assert await visitor.page.evaluate("ends") == ([] if whole == "true" else ["length"])
    complete = provider.plays(ROLE, chunk(finish="stop"), chunk(usage=(5, 1)), DONE)
    answer = await visitor.ask(complete, f"{{ whole: {whole} }}")
    assert (answer.text, answer.error) == ("", None), "an empty answer that is complete is none"


async def _has(visitor: Visitor, tokens: list[str]) -> bool:
    return await visitor.tokens() == tokens


@pytest.mark.parametrize("script", [[ROLE, chunk("One"), HANG], [HANG]], ids=["in an answer", "before the first token"])
async def test_an_abort_cancels_the_request_at_the_provider(
    visitor: Visitor, provider: FakeProvider, script: Script
) -> None:
    prompt = provider.plays(*script)
    asking = asyncio.create_task(visitor.ask(prompt, "{ stop: (window.stop_ = new AbortController()) }"))
    await wait_until(lambda: _has(visitor, ["One"]) if len(script) > 1 else provider.asked(prompt))
    await visitor.page.evaluate("stop_.abort()")
    answer = await asking
    assert (answer.text, answer.name, answer.known) == (None, "AbortError", False)
    await asyncio.wait_for(provider.asked(prompt)[0].canceled.wait(), 2)


async def test_an_abort_before_the_start_sends_no_request(visitor: Visitor, provider: FakeProvider, site: Site) -> None:
    prompt = provider.plays(tokens("no"))
    answer = await visitor.ask(prompt, "{ stop: { signal: AbortSignal.abort() } }")
    assert answer.name == "AbortError"
    assert not provider.asked(prompt)
    assert not [e for e in site.exchanges if e.path == "/session"]


async def test_an_abort_inside_on_token_ends_the_stream(visitor: Visitor, provider: FakeProvider) -> None:
    burst = b"".join([ROLE, chunk("One"), chunk("two"), chunk("three")])
    prompt = provider.plays(burst, HANG)
    await visitor.page.evaluate("window.stop_ = new AbortController()")
    answer = await visitor.ask(prompt, "{ stop: stop_, onToken: (t) => (tokens.push(t), stop_.abort()) }")
    assert answer.name == "AbortError"
    assert answer.tokens == ["One"]


async def test_an_abort_does_not_wait_for_a_slow_on_token(visitor: Visitor, provider: FakeProvider) -> None:
    prompt = provider.plays(ROLE, chunk("One"), HANG)
    await visitor.page.evaluate("window.stop_ = new AbortController()")
    never = "{ stop: stop_, onToken: () => new Promise(() => void (window.called = true)) }"
    asking = asyncio.create_task(visitor.ask(prompt, never))
    await visitor.page.wait_for_function("window.called")
    await visitor.page.evaluate("stop_.abort(new DOMException('late', 'TimeoutError'))")
    answer = await asyncio.wait_for(asking, 5)
    assert answer.name == "TimeoutError"
    await asyncio.wait_for(provider.asked(prompt)[0].canceled.wait(), 2)


async def test_an_error_in_on_token_ends_the_request(visitor: Visitor, provider: FakeProvider) -> None:
    prompt = provider.plays(ROLE, chunk("One"), HANG)
    answer = await visitor.ask(prompt, "{ onToken: () => { throw new RangeError('mine') } }")
    assert (answer.name, answer.message) == ("RangeError", "mine")
    await asyncio.wait_for(provider.asked(prompt)[0].canceled.wait(), 2)


async def test_a_slow_on_token_gets_all_tokens_in_order(visitor: Visitor, provider: FakeProvider) -> None:
    words = [f"{n} " for n in range(20)]
    slow = "async (t) => { await new Promise((r) => setTimeout(r, 12 * Math.random())); tokens.push(t) }"
    answer = await visitor.ask(provider.plays(tokens(*words)), f"{{ onToken: {slow} }}")
    assert answer.tokens == words


async def test_a_refused_token(app: App, visit: Visit, site: Site, provider: FakeProvider) -> None:
    site.token = app.token(expires=-60)
    async with visit(app) as visitor:
        for options in ("{}", "{ whole: true }"):
            answer = await visitor.ask("?", options)
            assert (answer.code, answer.status) == ("TOKEN_INVALID", 401)
            assert answer.known
            assert answer.requestId


async def test_no_session_is_an_error_without_a_request(app: App, visit: Visit, site: Site) -> None:
    async with visit(app) as visitor:
        site.token = None
        assert (await visitor.ask("?")).code == "TOKEN_UNAVAILABLE"
    async with visit(app) as visitor:
        auth = "export function getToken() { throw new Error('not signed in'); }"  # not async
        await visitor.page.route("**/auth.js", lambda route: route.fulfill(body=auth, content_type="text/javascript"))
        assert (await visitor.ask("?")).code == "TOKEN_UNAVAILABLE"


async def test_one_session_serves_many_questions(visitor: Visitor, site: Site) -> None:
    await visitor.page.evaluate("Promise.all([ask('a'), ask('b'), ask('c')])")
    assert len([e for e in site.exchanges if e.path == "/session"]) == 1


async def test_a_rate_limit_has_a_retry_time(visitor: Visitor, app: App) -> None:
    for _ in range(20):
        assert (await app.ask("quick")).status_code == 200
    answer = await visitor.ask("?")
    assert (answer.code, answer.status) == ("USER_RATE_LIMITED", 429)
    assert 50 <= answer.retryAfter <= 60


@pytest.mark.parametrize("env", [None, {"VITE_OTHER": "1"}], ids=["served as it is", "absent from the build"])
async def test_a_missing_address(app: App, visit: Visit, site: Site, env: dict[str, str] | None) -> None:
    site.env = env
    async with visit(app) as visitor:
        for options in ("{}", "{ whole: true }"):
            answer = await visitor.ask("?", options)
            assert (answer.code, answer.status) == ("INFERENCE_DISABLED", None)
            assert answer.known


async def test_an_origin_that_is_not_the_apps(app: App, visit: Visit, provider: FakeProvider) -> None:
    async with visit(app, at="another") as visitor:
        prompt = provider.plays(tokens("no"))
        assert (await visitor.ask(prompt)).code == "NETWORK_ERROR"
    assert not provider.asked(prompt)
