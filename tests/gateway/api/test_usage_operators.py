"""Operators read what the service and each account used."""

import time
from typing import Any

import pytest

from tests.support.accounts import App
from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_usage_requests_and_deploys_are_those_of_the_account(app: App, gw: Gateway) -> None:
    at, key = f"accounts/{app.account.id}", {"Authorization": f"Bearer {app.account.key}"}
    await app.ask("x")
    await app.post({"prompt": "x"}, headers={})

    async def recorded() -> bool:
        return len((await gw.platform("GET", f"{at}/requests")).json()) == 2

    await wait_until(recorded)
    for query in ("usage?by=hour&group=app", "usage?by=day&group=model", "requests?code=TOKEN_MISSING", "deploys"):
        own = await gw.http.get(f"/account/{query}", headers=key)
        assert own.status_code == 200
        assert (await gw.platform("GET", f"{at}/{query}")).json() == own.json(), query
    (refusal,) = (await gw.platform("GET", f"{at}/requests?code=TOKEN_MISSING&app={app.name}")).json()
    assert refusal["app"] == app.name
    rows = (await gw.platform("GET", f"{at}/usage?group=model&app={app.name}")).json()["rows"]
    assert sum(row["requests"] for row in rows) == 2
    for query in ("usage?app=another", "usage?group=model&app=another"):
        assert (await gw.platform("GET", f"{at}/{query}")).json() == {"rows": []}
        assert (await gw.http.get(f"/account/{query}", headers=key)).json() == {"rows": []}


async def test_the_services_hours(app: App, gw: Gateway) -> None:
    async def count() -> int:
        hours = (await gw.platform("GET", "usage?hours=2")).json()
        assert len(hours) == 2
        return sum(hour["requests"] for hour in hours)

    before = await count()
    await app.ask("x")
    await app.post({"prompt": "x"}, headers={})
    await wait_until(count, holds=lambda now: now >= before + 2)
    hours = (await gw.platform("GET", "usage?hours=2")).json()
    assert sum(hour["codes"].get("TOKEN_MISSING", 0) for hour in hours) >= 1
    assert sum(hour["nanoEuro"] for hour in hours) > 0
    assert [hour["hour"] for hour in hours] == sorted(hour["hour"] for hour in hours)


async def test_the_spend_of_all_accounts(app: App, gw: Gateway) -> None:
    await app.ask("x")

    async def recorded() -> list[dict[str, Any]]:
        rows = (await gw.platform("GET", "spend")).json()["rows"]
        return [row for row in rows if row["account"] == app.account.id]

    (row,) = await wait_until(recorded)
    assert row["accountName"].startswith("Account ")
    assert row["nanoEuro"] > 0
    assert row["start"] == time.strftime("%Y-%m-01T00:00:00.000Z", time.gmtime())
    for path in ("spend", f"accounts/{app.account.id}/usage"):
        (row,) = (await gw.platform("GET", f"{path}?by=month&group=provider")).json()["rows"]
        assert (row["provider"], row["requests"] > 0, row["nanoEuro"] > 0) == ("default", True, True)
    headers = {"Authorization": f"Bearer {OPERATOR}", "Accept": "text/csv"}
    answer = await gw.http.get("/platform/spend?by=month", headers=headers)
    heading, *lines = answer.text.splitlines()
    assert heading == "start,account,accountName,nanoEuro"
    assert any(app.account.id in line for line in lines)
    assert answer.headers["Content-Disposition"] == 'attachment; filename="spend-by-month.csv"'
    for query in ("from=noon", "by=hour", "group=app", "by=day&from=2026-01-01"):
        refused(await gw.platform("GET", f"spend?{query}"), 400, "REQUEST_MALFORMED")


async def test_refusals(gw: Gateway) -> None:
    for path in ("usage", "requests", "deploys"):
        refused(await gw.platform("GET", f"accounts/acc_nobody/{path}"), 404, "NOT_FOUND")
    usage = f"accounts/{(await gw.account()).id}/usage"
    for query in ("usage?hours=337", "usage?hours=0", f"{usage}?by=week", f"{usage}?from=2026-07-03&to=2026-07-02"):
        refused(await gw.platform("GET", query), 400, "REQUEST_MALFORMED")
