"""The figures of an account's last requests: of all that match, in bars that cover their time."""

import itertools
import time

import msgspec
import pytest

from gateway.ids import seconds_of
from gateway.keys import requests_key
from gateway.redis.client import Store
from gateway.telemetry.request_log import BARS, LEAST_BARS, Percentiles, RequestFilter, read_figures
from gateway.telemetry.usage import LoggedRequest

DAY = 86_400


async def log(store: Store, *ages: float, app: str = "notes", code: str = "") -> None:
    """Logs a request for each age in seconds. The answer of one that is a second old took 10 ms, of others longer."""
    requests = {}
    for age in ages:
        at, took = round((time.time() - age) * 1000), round(age * 10)
        status = 402 if code else 200
        each = LoggedRequest(f"{app}-{age}-{code}", at, app, "gpt", status, code, 1, 2, 3, took // 2, took)
        requests[msgspec.json.encode(each).decode()] = at
    await store.client.zadd(requests_key("acc"), requests)
    await store.client.expire(requests_key("acc"), 60)


async def test_figures_are_of_all_requests_that_match(store: Store) -> None:
    await log(store, *range(1, 101))
    await log(store, *range(200, 230), code="SPEND_CAP_REACHED")
    await log(store, *range(300, 305), app="shop", code="TOKEN_INVALID")
    figures = await read_figures(store, "acc", RequestFilter())
    assert (figures.matching, figures.logged) == (135, 135)
    assert list(figures.codes.items()) == [("SPEND_CAP_REACHED", 30), ("TOKEN_INVALID", 5)]
    assert figures.answerMs == Percentiles(500, 950, 990)
    assert sum(bar.requests for bar in figures.bars) == 135
    assert sum(bar.codes.get("TOKEN_INVALID", 0) for bar in figures.bars) == 5

    figures = await read_figures(store, "acc", RequestFilter(app="shop"))
    assert (figures.matching, figures.logged, figures.answerMs) == (5, 5, None)  # nothing of other apps
    assert (figures.values.apps, figures.values.codes) == (["shop"], ["TOKEN_INVALID"])
    assert sum(bar.requests for bar in figures.bars) == 5

    figures = await read_figures(store, "acc", RequestFilter(model="nothing"))
    assert (figures.matching, figures.logged, figures.bars, figures.firstTokenMs) == (0, 135, [], None)
    assert figures.values.apps == ["notes", "shop"]
    assert figures.values.codes == ["SPEND_CAP_REACHED", "TOKEN_INVALID"]
    assert (await read_figures(store, "acc", RequestFilter(app="nobody"))).logged == 0
    assert (await read_figures(store, "other", RequestFilter())).logged == 0


@pytest.mark.parametrize("oldest", [0.5, 100, 3_000, 50_000, 7 * DAY, 59 * DAY, 60 * DAY, 900 * DAY])
async def test_bars_cover_the_log(store: Store, oldest: float) -> None:
    await log(store, 0, oldest / 2, oldest)
    figures = await read_figures(store, "acc", RequestFilter())
    assert sum(bar.requests for bar in figures.bars) == 3
    assert LEAST_BARS <= len(figures.bars) <= BARS + 2
    starts = [seconds_of(bar.start) for bar in figures.bars]
    assert {after - before for before, after in itertools.pairwise(starts)} == {figures.barSeconds}
    assert starts[-1] <= time.time() <= starts[-1] + figures.barSeconds + 1
