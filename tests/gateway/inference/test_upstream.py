"""Several providers: the choice among them, and failover before the first token."""

import asyncio
import contextlib
import select
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.cancellation import cancel
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, answer, chunk, event, tokens
from tests.fakes.server import CLOSE, HANG, Script
from tests.support import inference_status
from tests.support.accounts import App
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway
from tests.support.metrics import metric
from tests.support.polling import wait_until
from tests.support.providers import NAMES, asked, heal, plays, several_providers, states
from tests.support.responses import answered, failed, refused, text_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

Trio = tuple[Gateway, list[FakeProvider]]

SOON = {
    **inference_status.SOON,
    "gateway.inference.health.PROBE_INTERVAL_SECONDS": 1,
    "gateway.inference.health.PROBE_HOLD_SECONDS": 1,
    "gateway.inference.health.REFUSAL_SECONDS": 0.3,
    "gateway.telemetry.counters.FLUSH_SECONDS": 0.2,
}
HASTY = {
    "GATEWAY_PROVIDER_TIMEOUTS": "connect=1,first=0.6,idle=1,total=20",
    "GATEWAY_RATE_LIMITS": "app=100000,user=100000",
    "GATEWAY_KEEP_ALIVE": "0.2",
}


@module_fixture
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trio]:
    fields = {"three": {"models": {"llama-3.3-70b-instruct": "meta/llama-3.3", "gpt-oss-120b": "openai/gpt-oss"}}}
    # A suspension does not end a running stream before its gate is checked.
    constants = {**SOON, "gateway.inference.upstream.STREAM_CHECK_SECONDS": 60}
    async with several_providers(tmp_path_factory.mktemp("trio"), constants, fields=fields, **HASTY) as trio:
        yield trio


@pytest_asyncio.fixture(loop_scope="session")
async def gw(running: Trio) -> Gateway:
    """A gateway with three healthy providers."""
    await heal(*running)
    return running[0]


@pytest.fixture
def providers(running: Trio) -> list[FakeProvider]:
    return running[1]


async def become(gw: Gateway, name: str, status: str) -> None:
    await wait_until(lambda: states(gw), holds=lambda rows: rows[name]["status"] == status)


async def switch_providers(gw: Gateway, *names: str, enabled: bool) -> None:
    for name in names:
        assert (await gw.platform("PUT", f"providers/{name}", {"enabled": enabled})).status_code == 200


# -- the choice ------------------------------------------------------------------------------------------------


async def test_a_provider_gets_its_own_name_for_the_model(providers: list[FakeProvider], app: App) -> None:
    prompt = plays(providers, answer(500), answer(500), tokens("three", model="openai/gpt-oss"))
    body = answered(await app.ask(prompt))
    assert (body["text"], body["model"]) == ("three", "gpt-oss-120b")
    (sent,) = providers[2].asked(prompt)
    assert sent.json["model"] == "openai/gpt-oss"
    assert {**sent.json, "model": ""} == {**providers[0].asked(prompt)[0].json, "model": ""}


# -- failover --------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Script, str]] = {
    "connection lost": ([CLOSE], "PROVIDER_UNREACHABLE"),
    "500": (answer(500), "PROVIDER_ERROR"),
    "an error event": ([ROLE, event({"error": {"code": 429}}), DONE], "PROVIDER_QUOTA_EXHAUSTED"),
}


@pytest.mark.parametrize(("fault", "stream"), [*((fault, False) for fault in FAULTS), ("an error event", True)])
async def test_a_fault_before_the_first_token(
    gw: Gateway, providers: list[FakeProvider], app: App, fault: str, stream: bool
) -> None:
    script, code = FAULTS[fault]
    prompt = plays(providers, script, tokens("two", usage=(7, 3)))
    counters = [
        f'gateway_provider_failovers_total{{code="{code}",provider="one"}}',
        f'gateway_provider_attempts_total{{outcome="{code}",provider="one"}}',
        'gateway_provider_attempts_total{outcome="ok",provider="two"}',
    ]
    before = [await metric(gw, counter) for counter in counters]
    response = await app.ask(prompt, stream=stream)
    if stream:
        assert response.text.count('data: {"token":') == response.text.count('data: {"token":"two"}') == 1
        assert '"usage":{"inputTokens":7,"outputTokens":3}' in response.text
    else:
        assert answered(response)["text"] == "two"
    assert asked(providers, prompt) == [1, 1, 0]
    assert await app.account.settled() == 7 * 150 + 3 * 600, "the failed attempt costs nothing"
    row = await app.logged(response.headers["X-Request-Id"])
    assert [(each["provider"], each["code"]) for each in row["attempts"]] == [("one", code), ("two", "")]
    assert (row["provider"], row["code"], row["nanoEuro"]) == ("two", "", 7 * 150 + 3 * 600)
    assert [await metric(gw, counter) for counter in counters] == [each + 1 for each in before]


async def test_keep_alives_go_on_over_a_failover(providers: list[FakeProvider], app: App) -> None:
    async with app.stream(plays(providers, (HANG,), (0.5, *tokens("two")))) as source:
        lines = [line async for line in source.response.aiter_lines()]
    assert lines.count(": keep-alive") >= 2
    assert lines.index(": keep-alive") < lines.index('data: {"token":"two"}')


async def test_nothing_is_sent_again_after_a_token(providers: list[FakeProvider], app: App) -> None:
    prompt = plays(providers, (ROLE, chunk("a"), 0.05, CLOSE), tokens("two"))
    assert failed(await app.events(prompt)) == "PROVIDER_ERROR"
    reasoning = plays(providers, (ROLE, chunk(reasoning_content="hm"), 0.05, CLOSE), tokens("two"))
    refused(await app.ask(reasoning), 502, "PROVIDER_ERROR")
    assert asked(providers, prompt) == asked(providers, reasoning) == [1, 0, 0]


async def test_three_attempts_at_most_and_the_last_code(providers: list[FakeProvider], app: App) -> None:
    prompt = plays(providers, answer(500), (CLOSE,), answer(402))
    response = await app.ask(prompt)
    refused(response, 503, "PROVIDER_QUOTA_EXHAUSTED")
    assert asked(providers, prompt) == [1, 1, 1]
    row = await app.logged(response.headers["X-Request-Id"])
    codes = [each["code"] for each in row["attempts"]]
    assert codes == ["PROVIDER_ERROR", "PROVIDER_UNREACHABLE", "PROVIDER_QUOTA_EXHAUSTED"]
    assert row["provider"] == "three"
    assert await app.account.settled() == 0


async def test_the_total_time_includes_all_attempts(tmp_path: Path, backend: FakeAppBackend) -> None:
    settings = {"GATEWAY_PROVIDER_TIMEOUTS": "connect=1,first=1,idle=5,total=2"}
    async with several_providers(tmp_path, SOON, **settings) as (gw, providers):
        app, prompt = await gw.app(backend), plays(providers, (HANG,), (ROLE, HANG), tokens("three"))
        began = time.monotonic()
        refused(await app.ask(prompt), 504, "PROVIDER_TIMEOUT")
        assert time.monotonic() - began < 2 + 1
        assert asked(providers, prompt) == [1, 1, 0], "no time was left for the third"


# What an operator does meanwhile, and how the request ends.
GATES: dict[str, tuple[Callable[[Gateway, App], Awaitable[Any]], int, str]] = {
    "file": (lambda gw, _: asyncio.to_thread(gw.off_file.touch), 503, "INFERENCE_DISABLED"),
    "switch": (lambda gw, _: gw.switch(enabled=False), 503, "INFERENCE_DISABLED"),
    "all disabled": (lambda gw, _: switch_providers(gw, *NAMES, enabled=False), 503, "INFERENCE_DISABLED"),
    "suspension": (
        lambda gw, app: gw.platform("PUT", f"apps/{app.name}/suspension", {"reason": "x"}),
        403,
        "APP_SUSPENDED",
    ),
    "deletion": (lambda gw, app: gw.platform("DELETE", f"apps/{app.name}"), 404, "APP_NOT_FOUND"),
}


@pytest.mark.parametrize("attempts", [0, 1])
@pytest.mark.parametrize("gate", GATES)
async def test_the_gates_are_checked_before_each_attempt(
    gw: Gateway, providers: list[FakeProvider], app: App, gate: str, attempts: int
) -> None:
    """Before the first one, the body arrives late."""
    close, status, code = GATES[gate]
    go = asyncio.Event()
    prompt = plays(providers, (go, *answer(500)), tokens("two"))

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt":'
        if not attempts:
            await go.wait()
        yield b'"%b"}' % prompt.encode()

    request = asyncio.create_task(app.post(content=body()))
    await wait_until(lambda: asked(providers, prompt) == [attempts, 0, 0])
    await asyncio.sleep(0.3)
    try:
        await close(gw, app)
        await asyncio.sleep(0.3)
        go.set()
        refused(await request, status, code)
    finally:
        gw.off_file.unlink(missing_ok=True)
    assert asked(providers, prompt) == [attempts, 0, 0]


async def test_a_browser_that_left_is_not_served_by_another(providers: list[FakeProvider], app: App) -> None:
    go = asyncio.Event()
    prompt = plays(providers, (go, *answer(500)), tokens("two"))
    asking = asyncio.create_task(app.ask(prompt))
    await wait_until(lambda: providers[0].asked(prompt))
    await cancel(asking)
    await wait_until(lambda: providers[0].asked(prompt)[0].canceled.is_set())
    go.set()
    await asyncio.sleep(0.3)
    assert asked(providers, prompt) == [1, 0, 0]


# -- health ----------------------------------------------------------------------------------------------------


async def test_a_new_key_in_the_file_brings_a_provider_back(tmp_path: Path, backend: FakeAppBackend) -> None:
    constants = {**SOON, "gateway.inference.health.PROBE_INTERVAL_SECONDS": 60}
    async with several_providers(tmp_path, constants, **HASTY) as (gw, providers):
        app = await gw.app(backend)
        (tmp_path / "one.key").write_text("wrong")
        await asyncio.sleep(1.5)
        providers[0].models_status = 401
        assert answered(await app.ask(plays(providers, tokens("one"), tokens("two"))))["text"] == "two"
        await become(gw, "one", "misconfigured")
        providers[0].models_status = 200
        (tmp_path / "one.key").write_text(providers[0].key)
        await become(gw, "one", "operational")
        assert answered(await app.ask(plays(providers, tokens("one"), tokens("two"))))["text"] == "one"


# -- operators -------------------------------------------------------------------------------------------------


async def test_a_disabled_provider_is_not_asked_and_its_streams_go_on(
    gw: Gateway, providers: list[FakeProvider], app: App
) -> None:
    go = asyncio.Event()
    prompt = plays(providers, (ROLE, chunk("a"), go, *tokens("b")[1:]), tokens("two"))
    running = asyncio.create_task(app.events(prompt))
    await wait_until(lambda: providers[0].asked(prompt))
    response = await gw.platform("PUT", "providers/one", {"enabled": False})
    assert response.status_code == 200
    row = response.json()
    assert (row["name"], row["region"], row["enabled"], row["status"]) == ("one", "fr-par", False, "operational")
    assert answered(await app.ask(plays(providers, tokens("one"), tokens("two"))))["text"] == "two"
    go.set()
    assert text_of(await running) == "ab"
    refused(await gw.platform("PUT", "providers/four", {"enabled": False}), 404, "NOT_FOUND")
    refused(await gw.platform("PUT", "providers/one", {}), 400, "REQUEST_MALFORMED")
    await switch_providers(gw, "one", enabled=True)
    assert answered(await app.ask(plays(providers, tokens("one"), tokens("two"))))["text"] == "one"
    assert "switch_provider" in (await gw.platform("GET", "audit")).text


# -- permits ---------------------------------------------------------------------------------------------------


@module_fixture
async def narrow(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trio]:
    """One permit at the first two providers each; the third serves another model only."""
    fields = {
        "one": {"concurrency": 1, "models": {"gpt-oss-120b": "gpt"}},
        "two": {"concurrency": 1, "models": {"gpt-oss-120b": "gpt"}},
        "three": {"concurrency": 1, "models": {"llama-3.3-70b-instruct": "llama"}},
    }
    folder = tmp_path_factory.mktemp("narrow")
    async with several_providers(folder, SOON, fields=fields, **HASTY, GATEWAY_PROVIDER_WAIT="3") as trio:
        yield trio


async def test_a_model_that_no_provider_serves(narrow: Trio, backend: FakeAppBackend) -> None:
    gw, app = narrow[0], await narrow[0].app(backend)
    response = await app.ask("x", model="qwen3.6-35b-a3b")
    error = refused(response, 400, "MODEL_NOT_ALLOWED")
    assert error["message"].endswith("offered here: gpt-oss-120b, llama-3.3-70b-instruct.")
    assert (await app.logged(response.headers["X-Request-Id"]))["model"] == "qwen3.6-35b-a3b"
    listing = (await gw.http.get(f"{app.path}/models", headers=app.headers())).json()["data"]
    assert [model["id"] for model in listing] == ["gpt-oss-120b", "llama-3.3-70b-instruct"]
    assert (await app.account.get("/capabilities")).json()["models"] == [model["id"] for model in listing]
    assert (await gw.http.get(f"{app.path}/models/qwen3.6-35b-a3b", headers=app.headers())).status_code == 404


def holds(go: asyncio.Event, word: str) -> Script:
    return [ROLE, chunk("a"), go, *tokens(word)[1:]]


async def are_waiting(gw: Gateway, name: str, count: int) -> bool:
    return await metric(gw, f'gateway_provider_waiting{{provider="{name}"}}') == count


async def test_a_full_provider_is_passed_over_and_who_waits_takes_the_first_free_permit(
    narrow: Trio, backend: FakeAppBackend
) -> None:
    gw, providers = narrow
    app = await gw.app(backend)
    ends = [asyncio.Event(), asyncio.Event()]
    first = plays(providers, holds(ends[0], "one"))
    second = plays(providers, tokens("one"), holds(ends[1], "two"))
    held = [asyncio.create_task(app.events(first))]
    await wait_until(lambda: providers[0].asked(first))
    held.append(asyncio.create_task(app.events(second)))
    await wait_until(lambda: providers[1].asked(second))
    prompt = plays(providers, tokens("one"), tokens("two"))
    waits = asyncio.create_task(app.ask(prompt))
    await wait_until(lambda: are_waiting(gw, "one", 1))
    assert await are_waiting(gw, "two", 1)
    ends[1].set()
    assert answered(await waits)["text"] == "two"
    await wait_until(lambda: are_waiting(gw, "one", 0))
    ends[0].set()
    assert [text_of(events) for events in await asyncio.gather(*held)] == ["aone", "atwo"]
    for _ in range(3):
        assert answered(await app.ask(plays(providers, tokens("one"))))["text"] == "one", "no permit was lost"


async def test_waiting_requests_leave_a_provider_that_is_disabled(narrow: Trio, backend: FakeAppBackend) -> None:
    gw, providers = narrow
    app, go = await gw.app(backend), asyncio.Event()
    first = plays([providers[2]], holds(go, "three"))
    held = asyncio.create_task(app.events(first, model="llama-3.3-70b-instruct"))
    await switch_providers(gw, "one", "two", enabled=False)
    await wait_until(lambda: providers[2].asked(first))
    waits = asyncio.create_task(app.ask("x", model="llama-3.3-70b-instruct"))
    await wait_until(lambda: are_waiting(gw, "three", 1))
    await switch_providers(gw, "three", enabled=False)
    refused(await waits, 503, "INFERENCE_DISABLED")
    await switch_providers(gw, "one", "two", enabled=True)
    error = refused(await app.ask("x", model="llama-3.3-70b-instruct"), 503, "INFERENCE_DISABLED")
    assert error["message"] == "This model is turned off; choose another one, or try again later."
    go.set()
    assert text_of(await held) == "athree"
    await switch_providers(gw, *NAMES, enabled=True)


@pytest.mark.parametrize("gate", ["one disabled", "suspension"])
async def test_the_gates_are_checked_after_the_gateway_has_connected(
    tmp_path: Path, backend: FakeAppBackend, gate: str
) -> None:
    """Its queue of connections is full, so the gateway's connection waits until the test accepts the others."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as stack:
        server.setblocking(False)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        fields = {"one": {"url": f"http://127.0.0.1:{server.getsockname()[1]}/v1"}}
        settings = {**HASTY, "GATEWAY_PROVIDER_TIMEOUTS": "connect=20,first=5,idle=5,total=60"}
        async with several_providers(tmp_path, SOON, fields=fields, **settings) as (gw, providers):
            app = await gw.app(backend)
            request = asyncio.create_task(app.ask(plays(providers, tokens("one"), tokens("two"))))
            await asyncio.sleep(0.5)
            if gate == "suspension":
                await GATES[gate][0](gw, app)
            else:
                await switch_providers(gw, "one", enabled=False)
            await asyncio.sleep(0.3)
            assert not request.done()
            accepted: list[socket.socket] = []
            while not request.done():
                with contextlib.suppress(TimeoutError):
                    connection, _ = await asyncio.wait_for(loop.sock_accept(server), 0.2)
                    accepted.append(stack.enter_context(connection))
            response = await request
            if gate == "suspension":
                refused(response, *GATES[gate][1:])
            else:
                assert answered(response)["text"] == "two"
            row = await app.logged(response.headers["X-Request-Id"])
            served = [] if gate == "suspension" else ["two"]
            assert [each["provider"] for each in row["attempts"]] == served
            rows = await wait_until(lambda: states(gw), holds=lambda rows: rows["two"]["attempts"] == len(served))
            assert (rows["one"]["attempts"], rows["one"]["failovers"]) == (0, 0)
            assert len(accepted) >= 2
            readable, *_ = select.select(accepted, (), (), 0)
            assert not any(connection.recv(1_000) for connection in readable), "no request was sent"
