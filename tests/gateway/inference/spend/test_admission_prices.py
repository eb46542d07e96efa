"""Prices that change while requests run, and models that only the operator's file has."""

import asyncio
import datetime
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.settings.prices import PRICES
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import chunk, tokens
from tests.support.accounts import App
from tests.support.gateway_process import gateway_with_redis
from tests.support.polling import wait_until
from tests.support.prices import cost
from tests.support.responses import answered

pytestmark = pytest.mark.asyncio(loop_scope="session")

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


async def spent(app: App) -> int:
    response = await app.account.get("/account")
    return int(response.json()["spend"]["settled"])


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
        assert await spent(app) == 10 * cost(100, 10)
        hold.set()
        answered(await running)
        assert await spent(app) == 11 * cost(100, 10), "the request in flight keeps its price"
        assert f"<code>{MODEL}</code><td class=number>€1.50<td class=number>€6.00" in (await gw.http.get("/")).text
        await check_a_model_only_in_the_file(app, provider)


async def check_a_model_only_in_the_file(app: App, provider: FakeProvider) -> None:
    gw, before = app.gateway, await spent(app)
    prompt = provider.plays(tokens("x", usage=(100, 10), model="small-1"))
    assert answered(await app.ask(prompt, model="small-1", maxTokens=50))["model"] == "small-1"
    assert provider.asked(prompt)[0].json["model"] == "small-1"
    assert await spent(app) - before == 25_200, "before its first time, its first price holds"
    listing = (await gw.http.get(f"{app.path}/models", headers=app.headers())).json()
    assert [each["id"] for each in listing["data"]] == [*PRICES, "small-1"]
    assert (await gw.http.get(f"{app.path}/models/small-1", headers=app.headers())).status_code == 200
    assert (await app.account.get("/capabilities")).json()["models"] == [*PRICES, "small-1"]
    assert "<code>small-1</code><td class=number>€0.002<td class=number>€2.50" in (await gw.http.get("/")).text
    rows = await wait_until(lambda: requests_of(app), holds=lambda rows: len(rows) == 3)
    assert (rows[0]["model"], rows[0]["nanoEuro"]) == ("small-1", 25_200)
