"""The details of an app over HTTP and on the command line, and its limits: values, and who can set them."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.accounts.domain_observations import Certificate, write_certificates
from gateway.ids import day_of
from gateway.keys import certificate_key, health_days_key, health_key, partition_tag, site_key
from gateway.monitors import history
from tests.fakes import FakeAppBackend
from tests.support.accounts import Account, App
from tests.support.command_line import Tool
from tests.support.gateway_process import Gateway
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

DAY_MS = 86_400_000


async def read(app: App, path: str = "") -> Any:
    answer = await app.account.get(f"/account/apps/{app.name}{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def live_through_a_bad_week(app: App) -> None:
    """An outage that ended, one that has not, a certificate, two crashes and three findings."""
    tag, now = partition_tag(app.account.id), int(time.time() * 1000)
    past = history.split_outage(now - 5 * DAY_MS, now - 5 * DAY_MS + 60_000)
    state = {"status": "unhealthy", "since": now - 120_000}
    with app.gateway.redis.client() as client:
        client.hset(health_days_key(tag, app.name), mapping={**past, f"{day_of(now - 3 * DAY_MS)}:down": 0})
        client.expire(health_days_key(tag, app.name), 600)
        client.hset(health_key(tag, app.name), mapping={"version": 1, "state": json.dumps(state)})
        client.hset(site_key(app.account.id, app.name), "live", "dep_1")
        certificates = {"a.example": Certificate("f", now + DAY_MS, "An Authority")}
        client.hset(certificate_key(tag, app.name), mapping=write_certificates(certificates))
    for crash in ({"reason": "exit", "exitCode": 3}, {"reason": "oom"}):
        assert (await app.gateway.platform("POST", f"apps/{app.name}/crashes", crash)).status_code == 202
    findings = [
        {"cve": cve, "component": "left-pad@1.0.0", "severity": severity, "fixedIn": fixed}
        for cve, severity, fixed in (("CVE-1", "low", None), ("CVE-2", "high", "1.0.1"), ("CVE-3", "critical", "2"))
    ]
    answer = await app.gateway.platform("POST", f"apps/{app.name}/findings", {"findings": findings})
    assert answer.status_code == 200, answer.text


async def test_an_app_without_any_history(app: App) -> None:
    shown = await read(app)
    assert (shown["status"], shown["liveDeploy"], shown["certificate"]) == ("never-live", None, None)
    assert len(shown["healthDays"]) == 90
    assert {day["downMs"] for day in shown["healthDays"]} == {None}
    assert await read(app, "/findings") == await read(app, "/crashes") == []


async def test_an_app_after_a_bad_week(app: App, tmp_path: Path) -> None:
    await live_through_a_bad_week(app)
    shown = await read(app)
    [listed] = [each for each in (await app.account.get("/account/apps")).json() if each["name"] == app.name]
    assert {name: shown[name] for name in listed} == listed
    assert (shown["health"], shown["liveDeploy"], shown["openFindings"]) == (
        "unhealthy",
        "dep_1",
        {"red": 2, "yellow": 1},
    )
    assert shown["certificate"].items() >= {"domain": "a.example", "issuer": "An Authority"}.items()
    days = shown["healthDays"]
    assert sum(day["outages"] for day in days[-7:-2]) == 1
    assert sum(day["downMs"] or 0 for day in days[-7:-2]) == 60_000
    assert days[-4] == {"day": days[-4]["day"], "downMs": 0, "outages": 0}
    # The current outage counts until now: today and, just after midnight, also yesterday.
    assert 120_000 <= sum(day["downMs"] or 0 for day in days[-2:]) < 600_000

    findings = await read(app, "/findings")
    assert [each["cve"] for each in findings] == ["CVE-2", "CVE-3", "CVE-1"]
    assert findings[0]["fixedIn"] == "1.0.1"
    assert findings[0]["deadlineAt"] > shown["createdAt"]
    assert [each["cve"] for each in await read(app, "/findings?limit=1")] == ["CVE-2"]
    newest, oldest = await read(app, "/crashes")
    assert (newest["reason"], newest["exitCode"], newest["lines"]) == ("oom", None, [])
    assert (oldest["reason"], oldest["exitCode"]) == ("exit", 3)

    capsule = Tool(app.gateway.address, app.account.key, tmp_path)
    text = (await capsule("apps", "show", app.name)).out
    for words in ("An Authority", "down 3 min", "in 2 outages", "CVE-2", "1.0.1", "out of memory", "exit code 3"):
        assert words in text
    with app.gateway.redis.client() as client:  # an outage that began before the history
        client.hdel(health_key(partition_tag(app.account.id), app.name), "state")
        key = health_days_key(partition_tag(app.account.id), app.name)
        client.delete(key)
        client.hset(key, mapping={f"{day_of(int(time.time() * 1000))}:down": 60_000})
        client.expire(key, 600)
    assert "1 day monitored, down 1 min 0 s\n" in (await capsule("apps", "show", app.name)).out
    assert (await capsule("apps", "show", app.name, "--json")).json.keys() >= {"healthDays", "findings", "crashes"}
    assert "NOT_FOUND" in await capsule.refused("apps", "show", "somebody-elses")


# -- limits ---------------------------------------------------------------------------------------------------


NONE = {"dailyEuro": None, "userDailyEuro": None, "requestsPerMinute": None, "userRequestsPerMinute": None}


async def put(app: App, body: Any) -> httpx.Response:
    return await app.account.call("PUT", f"/account/apps/{app.name}/limits", body)


async def limits(app: App) -> dict[str, Any]:
    response = await app.account.get(f"/account/apps/{app.name}/limits")
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_put_changes_the_limits_that_it_names(app: App) -> None:
    assert await limits(app) == NONE
    for body, after in (
        ({"dailyEuro": "0.50", "requestsPerMinute": 10}, {"dailyEuro": "0.50", "requestsPerMinute": 10}),
        ({"userDailyEuro": "0.000000001"}, {"userDailyEuro": "0.000000001"}),
        ({"dailyEuro": None, "userRequestsPerMinute": 0}, {"dailyEuro": None, "userRequestsPerMinute": 0}),
        ({}, {}),
        ({"dailyEuro": "0"}, {"dailyEuro": "0"}),
        (NONE, NONE),
    ):
        expected = {**await limits(app), **after}
        response = await put(app, body)
        assert (response.status_code, response.json()) == (200, expected)
        assert await limits(app) == expected


async def test_refused_limits(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend, "free")
    for body, message in (
        ({"dailyEuro": "0.050000001"}, "dailyEuro: the plan allows at most 0.05 euro per day."),
        ({"userDailyEuro": "1"}, "userDailyEuro: the plan allows at most 0.05 euro per day."),
        ({"requestsPerMinute": 31}, "requestsPerMinute: from 0 to 30 "),
        ({"userRequestsPerMinute": 21}, "userRequestsPerMinute: from 0 to 20 "),
        ({"requestsPerMinute": -1}, "requestsPerMinute: must be at least 0"),
        ({"requestsPerMinute": True}, "requestsPerMinute: "),
        ({"dailyEuro": 0.01}, "dailyEuro: "),
        *(
            ({"dailyEuro": text}, "dailyEuro: an amount in euro as text")
            for text in ("", "-0.01", "1e-3", "0.0000000001", " 0.01", "00.01", "NaN", "٠", "0.01\n")
        ),
        ({"perDay": "0.01"}, "body: "),
    ):
        error = refused(await put(app, body), 400, "REQUEST_MALFORMED")
        assert error["message"].startswith(message), error
    assert await limits(app) == NONE
    for rate in (-1, 1_000_001, 1.5):
        fields = {"account": app.account.id, "limits": {"requestsPerMinute": rate}}
        error = refused(await gw.platform("PUT", f"apps/{app.name}", fields), 400, "REQUEST_MALFORMED")
        assert error["message"].startswith("limits.requestsPerMinute: ")


async def test_operators_limit_the_values(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend, "starter", limits={"requestsPerMinute": 3000, "userRequestsPerMinute": None})
    shown = (await gw.platform("GET", f"apps/{app.name}")).json()["limits"]
    assert shown == {"requestsPerMinute": 3000}
    spend = (await app.account.get(f"/account/apps/{app.name}/spend")).json()
    assert spend["widest"] == {
        "dailyEuro": "0.50",
        "userDailyEuro": "0.50",
        "requestsPerMinute": 3000,
        "userRequestsPerMinute": 20,
    }
    assert (spend["settled"], spend["reserved"], spend["cap"]) == (0, 0, 500_000_000)
    assert (await put(app, {"requestsPerMinute": 3000, "dailyEuro": "0.5"})).status_code == 200
    refused(await put(app, {"requestsPerMinute": 3001}), 400, "REQUEST_MALFORMED")
    # With a smaller plan the limits stay, and the narrower ones apply.
    await gw.platform("PATCH", f"accounts/{app.account.id}", {"plan": "free"})
    assert (await limits(app))["dailyEuro"] == "0.5"
    spend = (await app.account.get(f"/account/apps/{app.name}/spend")).json()
    assert (spend["cap"], spend["widest"]["dailyEuro"]) == (50_000_000, "0.05")


# -- an account's own cap ------------------------------------------------------------------------------------


async def cap(account: Account, value: str | None) -> dict[str, Any]:
    answer = await account.gateway.platform("PATCH", f"accounts/{account.id}", {"dailyEuro": value})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_an_accounts_own_cap_replaces_the_plans(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend, "free")
    account = app.account
    assert "dailyEuro" not in await cap(account, None)
    assert (await cap(account, "3.5"))["dailyEuro"] == "3.5"
    assert (await account.spend())["cap"] == 3_500_000_000
    answered(await app.ask("hello"))
    # It stays when the plan changes, and limits of apps may go up to it.
    answer = await gw.platform("PATCH", f"accounts/{account.id}", {"plan": "starter"})
    assert (answer.json()["plan"], answer.json()["dailyEuro"]) == ("starter", "3.5")
    assert (await account.spend())["cap"] == 3_500_000_000
    assert (await put(app, {"dailyEuro": "3.5", "userDailyEuro": "3.4"})).status_code == 200
    spend = (await account.get(f"/account/apps/{app.name}/spend")).json()
    assert (spend["cap"], spend["widest"]["dailyEuro"]) == (3_500_000_000, "3.50")
    error = refused(await put(app, {"dailyEuro": "3.500000001"}), 400, "REQUEST_MALFORMED")
    assert error["message"] == "dailyEuro: the account allows at most 3.50 euro per day."
    for row in (await gw.platform("GET", f"accounts?search={account.id}")).json()["accounts"]:
        assert (row["cap"], row["dailyEuro"]) == (3_500_000_000, "3.5")
    # A narrower one wins over the app's.
    await cap(account, "0.000000001")
    refused(await app.ask("hello"), 402, "SPEND_CAP_REACHED")
    await cap(account, "0")
    refused(await app.ask("hello"), 402, "SPEND_CAP_REACHED")
    refused(await app.post(content=b"{"), 402, "SPEND_CAP_REACHED")
    assert (await account.spend())["cap"] == 0
    await cap(account, None)
    assert (await account.spend())["cap"] == 500_000_000
    answered(await app.ask("hello"))


async def test_refused_caps(gw: Gateway) -> None:
    account = await gw.account()
    for value in ("-1", "1e3", "NaN", "0.0000000001", "1000000.01", 5, "1" * 33):
        answer = await gw.platform("PATCH", f"accounts/{account.id}", {"dailyEuro": value})
        assert "dailyEuro" in refused(answer, 400, "REQUEST_MALFORMED")["message"]
    refused(await gw.platform("PATCH", f"accounts/{account.id}", {"cap": "1"}), 400, "REQUEST_MALFORMED")
    refused(await gw.platform("PATCH", "accounts/acc_nobody", {"dailyEuro": "1"}), 404, "NOT_FOUND")
    assert (await gw.platform("PATCH", f"accounts/{account.id}", {})).json()["plan"] == "max"
    await cap(account, "1000000")
    await cap(account, "0.5")
    record, *_ = (await gw.platform("GET", "audit?limit=1")).json()
    assert record["details"] == {"dailyEuro": "0.5", "dailyEuro before": "1000000"}
