"""The limits that account holders and operators set apply to an app's users in every process."""

from typing import Any

import pytest

from gateway.accounts.records import Account, AllowedRates, App, AppLimits
from gateway.inference.spend.limits import Limits, limits_of
from gateway.settings import Settings
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.support import accounts
from tests.support.gateway_process import Gateway
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import cost, max_cost
from tests.support.responses import answered, refused

session = pytest.mark.asyncio(loop_scope="session")


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
def test_the_narrower_limit_holds(own: AppLimits | None, allowed: AllowedRates | None, expected: Limits) -> None:
    app = App(id="a", name="a", account="acc", createdAt="", limits=own, allowedRates=allowed)
    assert limits_of(app, Account(id="acc", name="One", plan="free", createdAt=""), Settings()) == expected


async def set_limits(app: accounts.App, **limits: Any) -> None:
    path, headers = f"/account/apps/{app.name}/limits", {"Authorization": f"Bearer {app.account.key}"}
    response = await app.gateway.http.put(path, json=limits, headers=headers)
    assert response.status_code == 200, response.text


async def takes_effect(app: accounts.App, twin: Gateway, status: int) -> None:
    """Waits until both processes answer with the status, each request with a new user."""
    people = iter(range(10**6))

    async def both() -> bool:
        asks = [each.ask("x", token=each.token(f"user-{next(people)}")) for each in (app, app.at(twin))]
        return [(await ask).status_code for ask in asks] == [status] * 2

    await wait_until(both, PATIENCE_SECONDS, 0.2)


@session
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


@session
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
