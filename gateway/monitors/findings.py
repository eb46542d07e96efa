"""Stores the security findings of an app, and notifies its account of new red ones.

A scan replaces the previous one: findings that it does not name are closed, and count as new if they come back.
Findings are the same if their cve and component are. The account of a live app is notified of each red finding once
while the finding is open. While an app is not live, its red findings wait for the first scan after it went live.
Yellow findings are only stored and counted.

The open findings of an app are one record. A script replaces the record under its version and queues the events in the
same step, so two concurrent scans cannot notify twice.
"""

from collections.abc import Iterator, Mapping

import msgspec
import structlog

from gateway.accounts.records import App
from gateway.errors import BackboneUnavailable, RequestMalformed
from gateway.events.catalog import Finding, SecurityFinding, prepare_event
from gateway.events.webhooks import DATA_BYTES
from gateway.ids import new_id, now_iso
from gateway.keys import findings_key, partition_tag, site_key
from gateway.monitors import scripts
from gateway.monitors.scans import RANKS, ReportedFinding, Scan, Tier
from gateway.redis.client import Store
from gateway.settings import Settings

logger = structlog.get_logger()

MAX_OPEN = 5_000  # findings per app
DAY_SECONDS = 86_400


class OpenFinding(Finding, frozen=True, kw_only=True):
    notified: bool = False


class ScanCounts(msgspec.Struct, frozen=True):
    new: int
    known: int
    ignored: int  # duplicates, and findings that do not affect the app


def merge_scan(
    before: list[OpenFinding], scan: Scan, now: float, deadlines: Mapping[str, int], live: bool
) -> tuple[list[OpenFinding], list[OpenFinding], ScanCounts]:
    """Returns the open findings, those to notify now, and the counts.

    `now` is in seconds, `deadlines` are in days. Pure.
    """
    known = {(each.cve, each.component): each for each in before}
    reported: dict[tuple[str, str], ReportedFinding] = {}
    for each in scan.reported:
        key = (each.cve, each.component)
        if key not in reported or _weight(each) > _weight(reported[key]):
            reported[key] = each
    after, notify = [], []
    for key, each in reported.items():
        old = known.get(key)
        tier: Tier = "red" if each.red else "yellow"
        deadline = each.deadlineAt or (old.deadlineAt if old and old.tier == tier else None)
        notified = old is not None and old.notified
        due = live and tier == "red" and not notified
        finding = OpenFinding(
            cve=each.cve,
            component=each.component,
            severity=each.severity,
            fixedIn=each.fixedIn,
            tier=tier,
            deadlineAt=deadline or now_iso(now + deadlines[tier] * DAY_SECONDS),
            notified=notified or due,
        )
        after.append(finding)
        if due:
            notify.append(finding)
    again = len(reported.keys() & known.keys())
    ignored = scan.ignored + len(scan.reported) - len(reported)
    return after, notify, ScanCounts(len(reported) - again, again, ignored)


def _weight(reported: ReportedFinding) -> tuple[bool, int, bool]:
    return reported.red, RANKS.index(reported.severity), reported.fixedIn is not None


def split_into_events(findings: list[OpenFinding]) -> Iterator[SecurityFinding]:
    """Yields events whose data stays below its limit."""
    part: list[Finding] = []
    size = 0
    for each in findings:
        finding = Finding(**{name: getattr(each, name) for name in Finding.__struct_fields__})
        length = len(msgspec.json.encode(finding)) + 1
        if part and size + length > DATA_BYTES - 4_096:  # for the other fields, such as the app's name
            yield SecurityFinding(findings=part)
            part, size = [], 0
        part.append(finding)
        size += length
    if part:
        yield SecurityFinding(findings=part)


class Findings:
    def __init__(self, settings: Settings, store: Store) -> None:
        self._deadlines, self._store = settings.finding_deadlines, store

    async def find_open(self, app: App) -> list[Finding]:
        """Returns the open findings, most urgent first: red ones, then by deadline."""
        text = await self._store.client.hget(findings_key(partition_tag(app.account), app.id), "open")
        found = msgspec.json.decode(text or "[]", type=list[Finding])
        return sorted(found, key=lambda each: (each.tier != "red", each.deadlineAt or "", each.cve, each.component))

    async def record_scan(self, app: App, scan: Scan) -> ScanCounts:
        """Replaces the open findings of an app. Raises RequestMalformed or BackboneUnavailable before any change."""
        key = findings_key(partition_tag(app.account), app.id)
        for _ in range(10):
            seconds, _micros = await self._store.client.time()
            version, text = await self._store.client.hmget(key, ["version", "open"])
            live = bool(await self._store.client.hget(site_key(app.account, app.id), "live"))
            before = msgspec.json.decode(text or "[]", type=list[OpenFinding])
            after, notify, counts = merge_scan(before, scan, seconds, self._deadlines, live)
            if len(after) > MAX_OPEN:
                raise RequestMalformed(
                    f"findings: the scan has {len(after)} different findings; an app can have at most {MAX_OPEN}."
                )
            if await self._write(app, key, version or "", after, notify):
                return counts
        raise BackboneUnavailable("Several scans of this app arrived at once; send this one again.")

    async def _write(
        self, app: App, key: str, version: str, after: list[OpenFinding], notify: list[OpenFinding]
    ) -> bool:
        red = sum(each.tier == "red" for each in after)
        recorded = await scripts.record_observation(
            self._store,
            key,
            app=app.id,
            account=app.account,
            version=version,
            next_version=new_id("ver"),
            fields={"open": msgspec.json.encode(after).decode(), "red": red, "yellow": len(after) - red},
            events=[
                prepare_event(event, new_id("evt"), app.account, app.id, app.name)
                for event in split_into_events(notify)
            ],
        )
        if recorded and notify:
            logger.info(
                "monitor.event_queued", type=SecurityFinding.type, app=app.id, account=app.account, findings=len(notify)
            )
        return recorded
