"""The details of an app over HTTP and on the command line."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.accounts.domain_observations import Certificate, write_certificates
from gateway.ids import day_of
from gateway.keys import certificate_key, health_days_key, health_key, partition_tag, site_key
from gateway.monitors import history
from tests.support.accounts import App
from tests.support.command_line import Tool

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
