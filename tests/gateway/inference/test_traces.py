"""The trace of a request, as a collector receives it from a real gateway."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.collector import HEADER_SECRET, FakeCollector, Span
from tests.fakes.provider import MODEL, ROLE, chunk, tokens
from tests.fakes.server import CLOSE, HANG, Script, answer
from tests.support.accounts import App
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.metrics import metric
from tests.support.polling import wait_until
from tests.support.prices import cost

pytestmark = pytest.mark.asyncio(loop_scope="session")

INTERNAL, SERVER, CLIENT = 1, 2, 3
USER = "user-that-no-trace-names"
CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN = "00f067aa0ba902b7"


@module_fixture
async def collector() -> AsyncIterator[FakeCollector]:
    async with FakeCollector() as collector:
        yield collector


@module_fixture
async def traced(
    provider: FakeProvider, collector: FakeCollector, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A gateway with traces and one permit. At the end, nothing confidential has reached the collector or the log."""
    settings = collector.settings(GATEWAY_PROVIDER_CONCURRENCY="1", GATEWAY_DRAIN="1")
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("traced"), **settings) as gw:
        gw.confidential |= {USER, HEADER_SECRET, collector.address}
        yield gw
    assert collector.spans
    sent = [secret for secret in gw.secrets if secret.encode() in collector.raw]
    assert not sent, f"the collector was sent {sent}"


@pytest_asyncio.fixture(loop_scope="session")
async def shop(traced: Gateway, backend: FakeAppBackend) -> App:
    return await traced.app(backend)


async def ask(shop: App, prompt: str, **options: Any) -> httpx.Response:
    headers = shop.headers(shop.token(USER), **options.pop("headers", {}))
    return await shop.post({"prompt": prompt, **options}, headers=headers)


async def trace_of(collector: FakeCollector, response: httpx.Response) -> list[Span]:
    return await collector.wait_for_trace("capsule.request_id", response.headers["X-Request-Id"])


async def test_a_request_has_spans_for_its_stages(shop: App, provider: FakeProvider, collector: FakeCollector) -> None:
    before = time.time_ns()
    role, *answer = tokens("Guten", " Tag", usage=(11, 5), finish="length")
    prompt = provider.plays(role, answer[0], 0.05, *answer[1:])
    response = await ask(shop, prompt, stream=True, maxTokens=77)
    assert response.text.endswith("\n\n")
    root, *stages = await trace_of(collector, response)
    assert [(span.name, span.kind) for span in (root, *stages)] == [
        ("POST /capsule/{app}/ai", SERVER),
        ("verify", INTERNAL),
        ("admit", INTERNAL),
        (f"chat {MODEL}", CLIENT),
        ("settle", INTERNAL),
    ]
    assert root.parent == ""
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/capsule/{app}/ai",
        "http.response.status_code": 200,
        "capsule.request_id": response.headers["X-Request-Id"],
        "capsule.app": shop.name,
        "capsule.account": shop.account.id,
    }
    verify, admit, chat, settle = stages
    first = chat.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < first < (chat.ended - chat.began) / 1e9
    assert chat.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "127.0.0.1",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 77,
        "gen_ai.request.stream": True,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 5,
        "server.address": "127.0.0.1",
        "server.port": provider.port,
        "http.response.status_code": 200,
    }
    assert settle.attributes == {"capsule.nano_euro": cost(11, 5)}
    assert not verify.attributes
    assert not admit.attributes
    assert not any(span.failed for span in (root, *stages))
    ends = [moment for span in stages for moment in (span.began, span.ended)]
    assert sorted(ends) == ends
    assert before < root.began <= ends[0]
    assert ends[-1] <= root.ended < time.time_ns()
    assert root.process["service.name"] == "capsule-gateway"
    assert root.process["deployment.environment.name"] == "test"
    assert provider.asked(prompt)[0].header("traceparent") is None


async def test_a_callers_trace_is_continued(shop: App, provider: FakeProvider, collector: FakeCollector) -> None:
    prompt = provider.plays(tokens("a"))
    response = await ask(shop, prompt, headers={"traceparent": f"00-{CALLER}-{CALLER_SPAN}-01", "tracestate": "a=b"})
    root, *stages = await trace_of(collector, response)
    assert (root.trace, root.parent) == (CALLER, CALLER_SPAN)
    assert {span.trace for span in stages} == {CALLER}
    assert provider.asked(prompt)[0].header("traceparent") is None


@pytest.mark.parametrize("parents", [[b"%b-01x"], [b"%b-01"] * 2], ids=["garbage after it", "twice"])
async def test_a_malformed_traceparent_begins_a_new_trace(
    shop: App, provider: FakeProvider, collector: FakeCollector, parents: list[bytes]
) -> None:
    given = [("traceparent", parent % f"00-{CALLER}-{CALLER_SPAN}".encode()) for parent in parents]
    body = {"prompt": provider.plays(tokens("a"))}
    response = await shop.gateway.http.post(shop.path, json=body, headers=[*shop.headers().items(), *given])
    root, *stages = await trace_of(collector, response)
    assert root.parent == ""
    assert root.trace != CALLER
    assert len(stages) == 4


async def test_a_refusal_names_its_stage_and_is_not_a_failure(shop: App, collector: FakeCollector) -> None:
    bad_token = {"Authorization": "Bearer not.a.token"}
    for response, stage, code in (
        (await shop.post({}, headers=bad_token), "verify", "TOKEN_INVALID"),
        (await shop.post({"prompt": 5}), "", "REQUEST_MALFORMED"),
        (await shop.post({}, path="/secret-looking-path"), "", "NOT_FOUND"),
    ):
        root, *stages = await trace_of(collector, response)
        assert (root.error, root.failed) == (code, False)
        assert root.attributes["http.response.status_code"] == response.status_code
        assert {span.name: span.error for span in stages if span.error} == ({stage: code} if stage else {})
        assert not [span for span in collector.spans if "secret-looking-path" in str(span)]


@pytest.mark.parametrize("steps", [answer(500), [ROLE, chunk("Gu"), CLOSE]], ids=["status", "cut"])
async def test_a_failure_of_the_provider_is_a_failure_of_the_exchange(
    shop: App, provider: FakeProvider, collector: FakeCollector, steps: Script
) -> None:
    root, *_, chat, settle = await trace_of(collector, await ask(shop, provider.plays(*steps), stream=True))
    assert (root.error, root.failed) == ("PROVIDER_ERROR", True)
    assert (chat.kind, chat.error, chat.failed) == (CLIENT, "PROVIDER_ERROR", True)
    assert (settle.name, settle.error, settle.failed) == ("settle", None, False)


async def test_a_client_that_leaves_is_not_a_failure(
    shop: App, provider: FakeProvider, collector: FakeCollector
) -> None:
    prompt = provider.plays(ROLE, chunk("Gu"), HANG)
    async with shop.stream(prompt) as source:
        request_id = source.response.headers["X-Request-Id"]
        await anext(source.aiter_sse())
    root, *stages = await collector.wait_for_trace("capsule.request_id", request_id)
    assert (root.error, root.failed) == ("CLIENT_GONE", False)
    assert [span.error for span in stages] == [None, None, "CLIENT_GONE", None]


async def test_waiting_for_the_provider_is_a_stage(shop: App, provider: FakeProvider, collector: FakeCollector) -> None:
    gate = asyncio.Event()
    held = provider.plays(ROLE, gate, *tokens("a")[1:])
    first = asyncio.create_task(ask(shop, held))
    await wait_until(lambda: provider.asked(held))
    second = asyncio.create_task(ask(shop, provider.plays(tokens("b"))))
    waiting = partial(metric, shop.gateway, 'gateway_provider_waiting{provider="default"}')
    await wait_until(waiting, holds=lambda requests: requests == 1)
    gate.set()
    await first
    _, *stages = await trace_of(collector, await second)
    assert [span.name for span in stages] == ["verify", "admit", "wait", f"chat {MODEL}", "settle"]
