"""The limits, caps and prices that apply to an app's users, in every process."""

import asyncio
import datetime
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.accounts.records import Account, AllowedRates, AppLimits
from gateway.accounts.records import App as Record
from gateway.inference.spend.limits import Limits, limits_of
from gateway.settings import Settings
from gateway.settings.prices import PRICES
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk, tokens
from tests.fakes.server import CLOSE
from tests.support.accounts import App
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import EURO, cost, max_cost
from tests.support.responses import answered, counted, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("own", "allowed", "expected"),
    [
        (None, None, Limits(30, 20, 50_000_000)),
        (AppLimits(requestsPerMinute=7), None, Limits(7, 20, 50_000_000)),
        (AppLimits(requestsPerMinute=0, userRequestsPerMinute=0), None, Limits(0, 0, 50_000_000)),
        (AppLimits(dailyEuro="0.02", userDailyEuro="0.000000001"), None, Limits(30, 20, 50_000_000, 20_000_000, 1)),
        (AppLimits(dailyEuro="0"), None, Limits(30, 20, 50_000_000, 0)),
        (None, AllowedRates(3000), Limits(3000, 20, 50_000_000)),
        (AppLimits(requestsPerMinute=100), AllowedRates(3000, 600), Limits(100, 600, 50_000_000)),
        # An operator or a smaller plan may allow less than the account holder has set.
        (AppLimits(requestsPerMinute=25, userRequestsPerMinute=15), AllowedRates(5), Limits(5, 15, 50_000_000)),
    ],
)
async def test_the_narrower_limit_holds(own: AppLimits | None, allowed: AllowedRates | None, expected: Limits) -> None:
    app = Record(id="a", name="a", account="acc", createdAt="", limits=own, allowedRates=allowed)
    assert limits_of(app, Account(id="acc", name="One", plan="free", createdAt=""), Settings()) == expected


async def set_limits(app: App, **limits: Any) -> None:
    path, headers = f"/account/apps/{app.name}/limits", {"Authorization": f"Bearer {app.account.key}"}
    response = await app.gateway.http.put(path, json=limits, headers=headers)
    assert response.status_code == 200, response.text


async def takes_effect(app: App, twin: Gateway, status: int) -> None:
    """Waits until both processes answer with the status, each request with a new user."""
    people = iter(range(10**6))

    async def both() -> bool:
        asks = [each.ask("x", token=each.token(f"user-{next(people)}")) for each in (app, app.at(twin))]
        return [(await ask).status_code for ask in asks] == [status] * 2

    await wait_until(both, PATIENCE_SECONDS, 0.2)


async def test_setting_narrowing_and_clearing_take_effect_in_every_process(
    gw: Gateway, twin: Gateway, backend: FakeAppBackend
) -> None:
    app = await gw.app(backend)
    await takes_effect(app, twin, 200)
    for limits, status in (
        ({"dailyEuro": "0.000001"}, 402),
        ({"dailyEuro": "0.5"}, 200),
        ({"userDailyEuro": "0"}, 402),
        ({"userDailyEuro": None, "requestsPerMinute": 0}, 429),
        ({"requestsPerMinute": None}, 200),
    ):
        await set_limits(app, **limits)
        await takes_effect(app, twin, status)


async def test_an_app_and_a_user_have_caps_of_their_own(
    gw: Gateway, twin: Gateway, backend: FakeAppBackend, provider: FakeProvider
) -> None:
    account = await gw.account("free")
    app, other = await account.app(backend), await account.app(backend)
    # One request fits; once its cost is known, the second one exceeds the rest.
    prompt = provider.plays(tokens("a", "b", usage=(1000, 1000)))
    price, worst = cost(1000, 1000), max_cost(prompt)
    await set_limits(app, userDailyEuro=f"{worst / 10**9:.9f}", dailyEuro=f"{(worst + 2 * price) / 10**9:.9f}")
    assert answered(await app.ask(prompt))["usage"] == {"inputTokens": 1000, "outputTokens": 1000}
    assert await account.settled() == price
    response = await app.at(twin).ask(prompt)
    refused(response, 402, "USER_CAP_REACHED")
    assert 0 < int(response.headers["Retry-After"]) <= 86_400
    answered(await app.ask(prompt, token=app.token("ben")))
    assert await account.settled() == 2 * price
    answered(await app.at(twin).ask(prompt, token=app.token("eve")))
    await account.settled()
    response = await app.ask(prompt, token=app.token("joe"))
    refused(response, 402, "APP_CAP_REACHED")
    assert 0 < int(response.headers["Retry-After"]) <= 86_400
    refused(await app.post({"prompt": ""}), 400, "REQUEST_MALFORMED")  # neither cap is full
    answered(await other.ask(prompt))
    spend = (await account.get(f"/account/apps/{app.name}/spend")).json()
    assert (spend["settled"], spend["reserved"], spend["cap"]) == (3 * price, 0, worst + 2 * price)
    assert (await account.get(f"/account/apps/{other.name}/spend")).json()["settled"] == price


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


MODEL = "gpt-oss-120b"


def write_prices(folder: Path, *prices: tuple[str, float, float, float]) -> dict[str, str]:
    """Writes a prices file, and returns the setting that names it. `prices`: model, input, output, seconds."""
    path = folder / "prices.toml"
    path.write_text(
        "".join(
            f'[[price]]\nmodel = "{model}"\ninput = {into}\noutput = {out}\n'
            f"since = {datetime.datetime.fromtimestamp(since, datetime.UTC).isoformat()}\n"
            for model, into, out, since in prices
        )
    )
    return {"GATEWAY_PRICES_FILE": str(path)}


async def requests_of(app: App) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await app.account.get("/account/requests")).json()
    return rows


async def test_each_request_is_booked_at_the_price_of_its_own_time(
    tmp_path: Path, provider: FakeProvider, backend: FakeAppBackend
) -> None:
    change = time.time() + 10
    settings = write_prices(tmp_path, (MODEL, 1.5, 6, change), ("small-1", 0.002, 2.5, change + 9_000))
    async with gateway_with_redis(provider, tmp_path, **settings) as gw:
        app = await gw.app(backend)
        hold = asyncio.Event()
        first = provider.plays([chunk("a"), hold, *tokens("b", usage=(100, 10))])
        running = asyncio.create_task(app.ask(first, maxTokens=50))
        await wait_until(lambda: provider.asked(first))
        assert time.time() < change, "the machine is too slow for this test"
        await asyncio.sleep(change - time.time() + 0.05)
        second = provider.plays(tokens("c", usage=(100, 10)))
        answered(await app.ask(second, maxTokens=50))
        assert (await app.account.spend())["settled"] == 10 * cost(100, 10)
        hold.set()
        answered(await running)
        assert (await app.account.spend())["settled"] == 11 * cost(100, 10), "the request in flight keeps its price"
        assert f"<code>{MODEL}</code><td class=number>€1.50<td class=number>€6.00" in (await gw.http.get("/")).text
        await check_a_model_only_in_the_file(app, provider)


async def check_a_model_only_in_the_file(app: App, provider: FakeProvider) -> None:
    gw, before = app.gateway, await app.account.settled()
    prompt = provider.plays(tokens("x", usage=(100, 10), model="small-1"))
    assert answered(await app.ask(prompt, model="small-1", maxTokens=50))["model"] == "small-1"
    assert provider.asked(prompt)[0].json["model"] == "small-1"
    assert await app.account.settled() - before == 25_200, "before its first time, its first price holds"
    listing = (await gw.http.get(f"{app.path}/models", headers=app.headers())).json()
    assert [each["id"] for each in listing["data"]] == [*PRICES, "small-1"]
    assert (await gw.http.get(f"{app.path}/models/small-1", headers=app.headers())).status_code == 200
    assert (await app.account.get("/capabilities")).json()["models"] == [*PRICES, "small-1"]
    assert "<code>small-1</code><td class=number>€0.002<td class=number>€2.50" in (await gw.http.get("/")).text
    rows = await wait_until(lambda: requests_of(app), holds=lambda rows: len(rows) == 3)
    assert (rows[0]["model"], rows[0]["nanoEuro"]) == ("small-1", 25_200)
