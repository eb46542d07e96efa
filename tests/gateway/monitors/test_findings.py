"""Findings: which are open, and which the account is notified of, by the rule itself and over HTTP."""

import json
from typing import Any

import msgspec
import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from gateway.events.webhooks import DATA_BYTES
from gateway.keys import bodies_key, certificate_key, health_key, partition_tag, site_key
from gateway.monitors import findings, health
from gateway.monitors.findings import OpenFinding, merge_scan
from gateway.monitors.scans import ReportedFinding, Scan
from tests.fakes import FakeAppBackend
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.responses import refused

NOW = 1_782_979_200  # 2026-07-02T08:00:00Z
DEADLINES = {"red": 7, "yellow": 30}
WEEK, MONTH = "2026-07-09T08:00:00.000Z", "2026-08-01T08:00:00.000Z"


def reported(
    cve: str, component: str = "lib@1", severity: Any = "high", fixed: str | None = "2", **fields: Any
) -> ReportedFinding:
    return ReportedFinding(cve=cve, component=component, severity=severity, fixedIn=fixed, **fields)


class Ledger:
    """An app's findings over its scans."""

    def __init__(self, live: bool = True) -> None:
        self.open: list[OpenFinding] = []
        self.live, self.now = live, float(NOW)

    def scan(self, *reported: ReportedFinding, ignored: int = 0) -> tuple[list[str], tuple[int, int, int]]:
        """Returns the CVEs to notify, and the counts: new, known, ignored."""
        scan = Scan(list(reported), ignored)
        self.open, notify, counts = merge_scan(self.open, scan, self.now, DEADLINES, self.live)
        return [each.cve for each in notify], (counts.new, counts.known, counts.ignored)


# The rule


def test_a_finding_that_turns_red_is_notified_once() -> None:
    app = Ledger()
    assert app.scan(reported("CVE-1", fixed=None)) == ([], (1, 0, 0))
    app.now += 86_400
    assert app.scan(reported("CVE-1")) == (["CVE-1"], (0, 1, 0))
    assert app.open[0].deadlineAt == "2026-07-10T08:00:00.000Z"
    assert app.scan(reported("CVE-1", severity="low")) == ([], (0, 1, 0))
    twice = reported("CVE-1", severity="low"), reported("CVE-1", severity="critical"), reported("CVE-1")
    assert app.scan(*twice, ignored=2) == ([], (0, 1, 4))
    assert app.open[0].severity == "critical"


def test_the_first_scan_sets_the_deadline_unless_the_scan_gives_one() -> None:
    app = Ledger()
    for month in "12":
        given = reported("CVE-3", deadlineAt=f"2027-0{month}-01T00:00:00.000Z")
        app.scan(reported("CVE-1"), reported("CVE-2", severity="low"), given)
        app.now += 5 * 86_400
    assert [each.deadlineAt for each in app.open] == [WEEK, MONTH, "2027-02-01T00:00:00.000Z"]


SCANS = st.lists(
    st.lists(
        st.builds(
            reported, st.sampled_from(["1", "2", "3"]), st.sampled_from(["x", "y"]), st.sampled_from(["high", "low"])
        ),
        max_size=5,
    ),
    max_size=8,
)


@given(SCANS, st.lists(st.booleans(), min_size=8, max_size=8))
def test_any_sequence_of_scans(scans: list[list[ReportedFinding]], live: list[bool]) -> None:
    """A red finding of a live app is notified once while it is open. One that comes back is new."""
    app = Ledger()
    notified: set[tuple[str, str]] = set()  # of the open findings
    for scan, app.live in zip(scans, live, strict=False):
        named = {(each.cve, each.component) for each in scan}
        red = {(each.cve, each.component) for each in scan if each.red}
        notified &= named
        before = {(each.cve, each.component) for each in app.open}
        app.open, notify, counts = merge_scan(app.open, Scan(scan, 0), NOW, DEADLINES, app.live)
        now = [(each.cve, each.component) for each in notify]
        assert sorted(now) == sorted(red - notified if app.live else ())
        notified |= set(now)
        assert {(each.cve, each.component) for each in app.open} == named
        assert (counts.new, counts.known) == (len(named - before), len(named & before))
        assert counts.new + counts.known + counts.ignored == len(scan)


# Over HTTP


async def send(app: App, scan: Any) -> Any:
    return await app.gateway.platform("POST", f"apps/{app.name}/findings", scan)


async def send_accepted(app: App, scan: Any) -> tuple[int, int, int]:
    response = await send(app, scan)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body.keys() == {"new", "known", "ignored"}
    return body["new"], body["known"], body["ignored"]


async def go_live(app: App) -> None:
    async with redis.asyncio.Redis.from_url(app.gateway.redis.url) as client:
        await client.hset(site_key(app.account.id, app.name), "live", "dep_1")


async def queued_data(app: App) -> list[dict[str, Any]]:
    """Returns the data of the account's events that wait for delivery."""
    async with redis.asyncio.Redis.from_url(app.gateway.redis.url, decode_responses=True) as client:
        entries = await client.xrange(f"{partition_tag(app.account.id)}:events")
        bodies = await client.hgetall(bodies_key(app.account.id))
    mine = [fields for _, fields in entries if fields["account"] == app.account.id]
    assert {fields["type"] for fields in mine} <= {"security.finding"}
    return [json.loads(bodies[fields["id"]]) for fields in mine]


async def shown(app: App) -> dict[str, Any]:
    """Returns the app's row of the account's page."""
    (row,) = (await app.account.get("/account/apps")).json()
    return row


RED = {"cve": "CVE-1", "component": "lib@1", "severity": "critical", "fixedIn": "2"}
wire = pytest.mark.asyncio(loop_scope="session")


@wire
async def test_a_scan_of_a_live_app(app: App) -> None:
    assert await send_accepted(app, {"findings": [RED]}) == (1, 0, 0)
    assert await queued_data(app) == [], "the app is not live"
    await go_live(app)
    yellow = {"cve": "CVE-2", "component": "lib@1", "severity": "low", "fixedIn": None}
    assert await send_accepted(app, {"findings": [RED, yellow, RED]}) == (1, 1, 1)
    (data,) = await queued_data(app)
    deadline = data["findings"][0]["deadlineAt"]
    assert data == {
        "appId": app.name,
        "appName": app.name,
        "tier": "red",
        "findings": [{**RED, "tier": "red", "deadlineAt": deadline}],
    }
    assert (await shown(app))["openFindings"] == {"red": 1, "yellow": 1}
    assert await send_accepted(app, {"findings": [yellow, RED]}) == (0, 2, 0)
    assert len(await queued_data(app)) == 1
    assert await send_accepted(app, {"findings": []}) == (0, 0, 0)
    assert (await shown(app))["openFindings"] == {"red": 0, "yellow": 0}
    assert await send_accepted(app, {"findings": [RED]}) == (1, 0, 0)
    assert len(await queued_data(app)) == 2


@wire
async def test_a_malformed_scan_changes_nothing(app: App) -> None:
    await send_accepted(app, {"findings": [RED]})
    for scan in ({"findings": [RED, {**RED, "cve": None}]}, {"nothing": []}, {"matches": [{}]}, []):
        refused(await send(app, scan), 400, "REQUEST_MALFORMED")
    many = [{**RED, "cve": f"CVE-{n}"} for n in range(findings.MAX_OPEN + 1)]
    assert "5000" in refused(await send(app, {"findings": many}), 400, "REQUEST_MALFORMED")["message"]
    assert (await shown(app))["openFindings"] == {"red": 1, "yellow": 0}
    assert await send_accepted(app, {"findings": [RED]}) == (0, 1, 0)


@wire
async def test_a_large_scan(app: App) -> None:
    """A scan may be larger than other bodies (1 MiB), and its events are split."""
    await go_live(app)
    many = [
        {"cve": f"CVE-{n}", "component": f"{'c' * 250}-{n}", "severity": "high", "fixedIn": "2"}
        for n in range(findings.MAX_OPEN)
    ]
    assert len(msgspec.json.encode(many)) > 1_048_576
    assert await send_accepted(app, {"findings": many}) == (findings.MAX_OPEN, 0, 0)
    data = await queued_data(app)
    assert sum(len(each["findings"]) for each in data) == findings.MAX_OPEN
    assert max(len(msgspec.json.encode(each)) for each in data) <= DATA_BYTES
    assert await send_accepted(app, {"findings": many}) == (0, findings.MAX_OPEN, 0)
    assert len(await queued_data(app)) == len(data)


@wire
async def test_an_app_before_and_after_its_inspection(gw: Gateway, backend: FakeAppBackend) -> None:
    app = await gw.app(backend, plan="starter")
    row = await shown(app)
    assert (row["status"], row["health"], row["healthSince"]) == ("never-live", "unknown", None)
    assert (row["certificateExpiresAt"], row["openFindings"]) == (None, {"red": 0, "yellow": 0})
    await go_live(app)
    tag = partition_tag(app.account.id)
    state = health.AppHealth(status="unhealthy", since=NOW * 1000, failures=4)
    async with redis.asyncio.Redis.from_url(gw.redis.url) as client:
        await client.hset(health_key(tag, app.name), "state", msgspec.json.encode(state))
        await client.hset(certificate_key(tag, app.name), "expiresAt", NOW * 1000 + 7)
    row = await shown(app)
    assert (row["status"], row["health"], row["healthSince"]) == ("live", "unhealthy", "2026-07-02T08:00:00.000Z")
    assert row["certificateExpiresAt"] == "2026-07-02T08:00:00.007Z"
    await gw.platform("PATCH", f"accounts/{app.account.id}", {"plan": "free"})
    assert (await shown(app))["health"] == "unknown", "it is no longer probed"
