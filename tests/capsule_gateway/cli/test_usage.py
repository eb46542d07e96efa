"""`capsule usage` and `capsule requests`, against a running gateway."""

import time

import pytest

from tests.support.accounts import App
from tests.support.command_line import Tool
from tests.support.polling import wait_until
from tests.support.prices import cost

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_usage_and_requests(capsule: Tool, app: App) -> None:
    assert (await capsule("usage")).line == "No requests in this period."
    assert (await capsule("requests")).line == "No requests yet."
    answered = await app.ask("x")
    await app.ask("x", token="no.token.at.all")
    await wait_until(lambda: capsule("requests", "--json"), 10, holds=lambda run: len(run.json) == 2)
    (heading, row), day = (await capsule("usage", "--days", "7")).rows, time.strftime("%Y-%m-%d", time.gmtime())
    columns = "DAY,REQUESTS,REFUSED,INTERRUPTED,TOKENS IN,TOKENS OUT,EUR,INTERRUPTED EUR"
    assert heading == columns.split(",")
    assert row == [day, "2", "1", "0", "7", "3", "0.00000285", "0.00"]
    by_model = (await capsule("usage", "--by", "model")).out
    assert "(unknown)" in by_model
    assert "gpt-oss-120b" in by_model
    rows = (await capsule("usage", "--days", "1", "--by", "app", "--json")).json["rows"]
    assert [(row["app"], row["nanoEuro"]) for row in rows] == [(app.name, cost(7, 3))]

    shown = (await capsule("requests", "--app", app.name, "--limit", "5")).out
    assert "401 TOKEN_INVALID" in shown
    assert answered.headers["X-Request-Id"] in shown
    kept = (await capsule("requests", "--outcome", "answered", "--json")).json
    assert [row["id"] for row in kept] == [answered.headers["X-Request-Id"]]
    assert (await capsule("requests", "--model", "another")).line == "No such requests."
    assert "401 TOKEN_INVALID (malformed)" in shown
    refused = (await capsule("requests", "--code", "TOKEN_INVALID", "--since", "2026-01-01", "--json")).json
    assert [row["reason"] for row in refused] == ["malformed"]
    assert (await capsule("requests", "--before", kept[0]["id"])).line == "No such requests."
    assert "before" in await capsule.refused("requests", "--before", "unknown")
    assert (await capsule("requests", "--code", "TOKEN_INVALID", "--since", "1h", "--json")).json == refused
    assert (await capsule("requests", "--until", "1h", "--json")).json == []
    page = await capsule("requests", "--since", "2026-01-01", "--limit", "1")
    figures, more = page.err.splitlines()
    assert figures.startswith("2 of the 2 requests in the log match; full answer p50 ")
    assert more == f"More: capsule requests --since 2026-01-01 --limit 1 --before {refused[0]['id']}"
    assert (await capsule(*more.split()[2:])).rows[1][0] == kept[0]["id"]
    one = (await capsule("requests", kept[0]["id"])).out
    assert f"{kept[0]['id']}\n" in one
    assert "limit requestsPerMinute      1 of 30 requests" in one
    assert "NOT_FOUND" in await capsule.refused("requests", "unknown")
    assert "--days" in await capsule.refused("usage", "--days", "401", code=2)
    assert "--limit" in await capsule.refused("requests", "--limit", "1001", code=2)
