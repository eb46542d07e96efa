"""`capsule limits`, against a running gateway."""

import pytest

from tests.support.accounts import App
from tests.support.command_line import Tool

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_set_show_and_clear(capsule: Tool, app: App) -> None:
    assert (await capsule("limits", "show", app.name)).rows == [
        ["app", app.name],
        ["spent today", "0.00 of 10.00 EUR"],
        ["per day", "10.00 EUR (the plan's limit)"],
        ["per day and user", "10.00 EUR (the plan's limit)"],
        ["per minute", "30 requests (the plan's limit)"],
        ["per minute and user", "20 requests (the plan's limit)"],
    ]
    run = await capsule("limits", "set", app.name, "--daily-euro", "0.50", "--user-rpm", "0")
    assert "0.00 of 0.50 EUR" in run.out
    assert "0.50 EUR (the plan allows 10.00)" in run.out
    assert "0 requests (the plan allows 20)" in run.out
    run = await capsule("limits", "set", app.name, "--user-rpm", "none", "--user-daily-euro", "0.01", "--json")
    expected = {"dailyEuro": "0.50", "userDailyEuro": "0.01", "requestsPerMinute": None, "userRequestsPerMinute": None}
    assert run.json == expected
    assert (await capsule("limits", "show", app.name, "--json")).json == expected


async def test_refused_limits(capsule: Tool, app: App) -> None:
    for arguments, code, words in (
        ((), 2, "name at least one limit"),
        (("--rpm", "many"), 2, "--rpm: 'many' is not a whole number of requests"),
        (("--rpm", "9" * 5_000), 2, "is not a whole number of requests"),
        (("--rpm", "31"), 1, "--rpm: from 0 to 30"),
        (("--daily-euro", "11"), 1, "the plan allows at most 10.00 euro per day"),
        (("--daily-euro", "0,5"), 1, "--daily-euro: an amount in euro as text"),
    ):
        run = await capsule("limits", "set", app.name, *arguments)
        assert (run.code, words in run.err) == (code, True), run.err
    assert (await capsule("limits", "show", "nowhere")).code == 1
