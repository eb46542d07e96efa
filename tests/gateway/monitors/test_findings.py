"""Findings: which are open, and which the account is notified of, by the rule itself and over HTTP."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.events.webhooks import DATA_BYTES
from gateway.keys import bodies_key, site_key
from gateway.monitors import findings
from gateway.monitors.findings import OpenFinding, merge_scan
from gateway.monitors.scans import ReportedFinding, Scan
from tests.support.accounts import App
from tests.support.responses import refused
from tests.support.webhook_holder import read_queue

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


def go_live(app: App) -> None:
    with app.gateway.redis.client() as client:
        client.hset(site_key(app.account.id, app.name), "live", "dep_1")


def read_queued_data(app: App) -> list[dict[str, Any]]:
    """Returns the data of the account's events that wait for delivery."""
    queue = read_queue(app.account)
    assert {event["type"] for event in queue} <= {"security.finding"}
    with app.gateway.redis.client() as client:
        return [json.loads(client.hget(bodies_key(app.account.id), event["id"])) for event in queue]


async def count_open(app: App) -> dict[str, int]:
    """Returns what the account's page shows of the app."""
    (row,) = (await app.account.get("/account/apps")).json()
    found: dict[str, int] = row["openFindings"]
    return found


RED = {"cve": "CVE-1", "component": "lib@1", "severity": "critical", "fixedIn": "2"}
wire = pytest.mark.asyncio(loop_scope="session")


@wire
async def test_a_scan_of_a_live_app(app: App) -> None:
    assert await send_accepted(app, {"findings": [RED]}) == (1, 0, 0)
    assert read_queued_data(app) == [], "the app is not live"
    go_live(app)
    yellow = {"cve": "CVE-2", "component": "lib@1", "severity": "low", "fixedIn": None}
    assert await send_accepted(app, {"findings": [RED, yellow, RED]}) == (1, 1, 1)
    (data,) = read_queued_data(app)
    finding = {**RED, "tier": "red", "deadlineAt": data["findings"][0]["deadlineAt"]}
    assert data == {"appId": app.name, "appName": app.name, "tier": "red", "findings": [finding]}
    assert await count_open(app) == {"red": 1, "yellow": 1}
    assert await send_accepted(app, {"findings": [yellow, RED]}) == (0, 2, 0)
    assert len(read_queued_data(app)) == 1
    assert await send_accepted(app, {"findings": []}) == (0, 0, 0)
    assert await count_open(app) == {"red": 0, "yellow": 0}
    assert await send_accepted(app, {"findings": [RED]}) == (1, 0, 0)
    assert len(read_queued_data(app)) == 2


@wire
async def test_a_malformed_scan_changes_nothing(app: App) -> None:
    await send_accepted(app, {"findings": [RED]})
    for scan in ({"findings": [RED, {**RED, "cve": None}]}, {"nothing": []}, {"matches": [{}]}, []):
        refused(await send(app, scan), 400, "REQUEST_MALFORMED")
    many = [{**RED, "cve": f"CVE-{n}"} for n in range(findings.MAX_OPEN + 1)]
    assert "5000" in refused(await send(app, {"findings": many}), 400, "REQUEST_MALFORMED")["message"]
    assert await count_open(app) == {"red": 1, "yellow": 0}
    assert await send_accepted(app, {"findings": [RED]}) == (0, 1, 0)


@wire
async def test_a_large_scan(app: App) -> None:
    """A scan may be larger than other bodies (1 MiB), and its events are split."""
    go_live(app)
    many = [
        {"cve": f"CVE-{n}", "component": f"{'c' * 250}-{n}", "severity": "high", "fixedIn": "2"}
        for n in range(findings.MAX_OPEN)
    ]
    assert len(msgspec.json.encode(many)) > 1_048_576
    assert await send_accepted(app, {"findings": many}) == (findings.MAX_OPEN, 0, 0)
    data = read_queued_data(app)
    assert sum(len(each["findings"]) for each in data) == findings.MAX_OPEN
    assert max(len(msgspec.json.encode(each)) for each in data) <= DATA_BYTES
    assert await send_accepted(app, {"findings": many}) == (0, findings.MAX_OPEN, 0)
    assert len(read_queued_data(app)) == len(data)
