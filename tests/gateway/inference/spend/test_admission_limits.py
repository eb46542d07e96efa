"""Rate limits and the daily cap over HTTP."""

import asyncio

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk, tokens
from tests.fakes.server import CLOSE
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import EURO, cost, max_cost
from tests.support.responses import answered, counted, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_user_has_twenty_requests_per_minute(app: App) -> None:
    for left in range(19, -1, -1):
        limit, remaining, reset = counted(await app.ask("x"))
        assert (limit, remaining) == (20, left)
        assert 0 < reset <= 60
    response = await app.ask("x")
    refused(response, 429, "USER_RATE_LIMITED")
    assert counted(response)[:2] == (20, 0)
    assert 50 <= int(response.headers["Retry-After"]) <= 60
    assert (await app.ask("x", token=app.token("ben"))).status_code == 200


async def test_requests_that_do_not_count(app: App) -> None:
    refused(await app.ask("x", token="no.to.ken"), 401, "TOKEN_INVALID")
    evil = app.headers(Origin="https://evil.example")
    refused(await app.post({"prompt": "x"}, headers=evil), 403, "ORIGIN_NOT_ALLOWED")
    assert counted(await app.ask("x"))[1] == 19


async def test_the_worst_case_is_reserved_while_a_request_runs(app: App, provider: FakeProvider) -> None:
    gate = asyncio.Event()
    prompt = provider.plays(gate, tokens("x", usage=(3, 1)), prompt="Combien d'euros ? € 6f1d")
    asking = asyncio.create_task(app.ask(prompt, model="llama-3.3-70b-instruct", maxTokens=123))
    await wait_until(lambda: provider.asked(prompt))
    spend = await app.account.spend()
    assert spend["reserved"] == max_cost(prompt, 123, "llama-3.3-70b-instruct")
    assert spend["settled"] == 0
    gate.set()
    answered(await asking)
    # The provider reported another model of the price table, so that model's price applies.
    assert await app.account.settled() == cost(3, 1, "gpt-oss-120b")


async def test_a_larger_plan_takes_effect(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend, "free")
    big = {"prompt": "z" * 60_000, "model": "llama-3.3-70b-instruct"}
    refused(await app.post(big), 402, "SPEND_CAP_REACHED")
    patched = await gw.platform("PATCH", f"accounts/{app.account.id}", {"plan": "starter"})
    assert patched.status_code == 200

    async def passes() -> bool:
        return (await app.post(big)).status_code == 200

    await wait_until(passes, PATIENCE_SECONDS, 0.1)
    assert (await app.account.spend())["cap"] == EURO // 2


FILLING = "f" * 3744  # (3744 + 256) × 150 + 1000 × 600 = 0.0012 EUR


async def test_the_cap_to_the_nano_euro(low_caps: Gateway, backend: FakeAppBackend, provider: FakeProvider) -> None:
    app = await low_caps.app(backend, "free")
    cap = (await app.account.spend())["cap"]
    assert max_cost(FILLING, 1000) == cap == 1_200_000
    refused(await app.ask(FILLING + "f", maxTokens=1000), 402, "SPEND_CAP_REACHED")
    assert (await app.account.spend())["reserved"] == 0
    provider.plays(ROLE, chunk("x"), CLOSE, prompt=FILLING)
    refused(await app.ask(FILLING, maxTokens=1000), 502, "PROVIDER_ERROR")
    assert await app.account.settled() == cap
    refused(await app.ask("x", maxTokens=1), 402, "SPEND_CAP_REACHED")
    # A faulty request only checks whether the cap is already full.
    refused(await app.post({"prompt": ""}), 402, "SPEND_CAP_REACHED")
    refused(await app.post({"prompt": "x", "model": "gpt-5"}), 402, "SPEND_CAP_REACHED")
    refused(await app.post(content=b"x" * 200_000, headers=app.headers()), 402, "SPEND_CAP_REACHED")
    assert (await app.account.spend())["reserved"] == 0


async def test_a_faulty_request_below_the_cap_reserves_nothing(low_caps: Gateway, backend: FakeAppBackend) -> None:
    """This also holds if its maximum cost would not fit."""
    app = await low_caps.app(backend, "starter")
    refused(await app.ask("x"), 402, "SPEND_CAP_REACHED")
    refused(await app.post({"prompt": "x", "maxTokens": 0}), 400, "REQUEST_MALFORMED")
    assert (await app.account.spend())["reserved"] == 0
