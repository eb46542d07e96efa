"""Security findings of an app: what the last scan found, and which of it was told.

A scan is the whole truth about an app: what it does not name is closed, and new if it ever comes back. A finding is
the same while cve and component are. Each red one is told once while it is open, when the app is live; one of an app
that is not is told by the first scan after it went live. Yellow ones are kept and counted, never told.

What is open is one record, replaced under its version together with the events that follow, so that two scans at a
time cannot both tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import structlog

from gateway.accounts.records import App
from gateway.errors import BackboneUnavailable, RequestMalformed
from gateway.events.catalogue import Finding, SecurityFinding, queued_event
from gateway.events.receivers import DATA_BYTES
from gateway.ids import new_id, now_iso
from gateway.monitors.scans import RANKS, Reported, Scan, Tier
from gateway.settings import Settings
from gateway.store import keys, scripts
from gateway.store.client import Store, backbone
from gateway.store.scripts import Observation

logger = structlog.get_logger()

OPEN = 5_000  # findings of one app
DAY = 86_400  # seconds


class Open(Finding, frozen=True, kw_only=True):
    told: bool = False


class Counts(msgspec.Struct, frozen=True):
    new: int
    known: int
    ignored: int  # named twice, or not affecting the app


def merge(
    before: list[Open], scan: Scan, now: float, deadlines: Mapping[str, int], live: bool
) -> tuple[list[Open], list[Open], Counts]:
    """What is open from now on, and of it what is told now. `now` in seconds, deadlines in days. Pure."""
    known = {(each.cve, each.component): each for each in before}
    reported: dict[tuple[str, str], Reported] = {}
    for each in scan.reported:
        key = (each.cve, each.component)
        if key not in reported or _weight(each) > _weight(reported[key]):
            reported[key] = each
    after, telling = [], []
    for key, each in reported.items():
        old, tier = known.get(key), _tier(each)
        deadline = each.deadlineAt or (old.deadlineAt if old and old.tier == tier else None)
        told = old is not None and old.told
        tell = live and tier == "red" and not told
        finding = Open(
            cve=each.cve,
            component=each.component,
            severity=each.severity,
            fixedIn=each.fixedIn,
            tier=tier,
            deadlineAt=deadline or now_iso(now + deadlines[tier] * DAY),
            told=told or tell,
        )
        after.append(finding)
        if tell:
            telling.append(finding)
    again = len(reported.keys() & known.keys())
    ignored = scan.ignored + len(scan.reported) - len(reported)
    return after, telling, Counts(len(reported) - again, again, ignored)


def _tier(reported: Reported) -> Tier:
    return "red" if reported.red else "yellow"


def _weight(reported: Reported) -> tuple[bool, int, bool]:
    return reported.red, RANKS.index(reported.severity), reported.fixedIn is not None


def events(telling: list[Open]) -> Iterator[SecurityFinding]:
    """As many as it takes to keep each one's data within its bound."""
    part: list[Finding] = []
    size = 0
    for each in telling:
        finding = Finding(**{name: getattr(each, name) for name in Finding.__struct_fields__})
        length = len(msgspec.json.encode(finding)) + 1
        if part and size + length > DATA_BYTES - 4_096:  # the app's names and the like
            yield SecurityFinding(findings=part)
            part, size = [], 0
        part.append(finding)
        size += length
    if part:
        yield SecurityFinding(findings=part)


class Findings:
    def __init__(self, settings: Settings, store: Store) -> None:
        self._deadlines, self._store = settings.finding_deadlines, store

    async def take_in(self, app: App, scan: Scan) -> Counts:
        """Raises RequestMalformed, or BackboneUnavailable; then nothing has changed."""
        key = keys.findings_key(keys.tag(app.account), app.id)
        for _ in range(10):
            with backbone():
                seconds, _micros = await self._store.client.time()
                version, text = await self._store.client.hmget(key, ["version", "open"])
                live = bool(await self._store.client.hget(keys.site_key(app.account, app.id), "live"))
            before = msgspec.json.decode(text or "[]", type=list[Open])
            after, telling, counts = merge(before, scan, seconds, self._deadlines, live)
            if len(after) > OPEN:
                raise RequestMalformed(f"findings: {len(after)} different ones; at most {OPEN} are kept of an app.")
            if await self._write(app, key, version or "", after, telling):
                return counts
        raise BackboneUnavailable("Several scans of this app arrive at once; send it again.")

    async def _write(self, app: App, key: str, version: str, after: list[Open], telling: list[Open]) -> bool:
        red = sum(each.tier == "red" for each in after)
        observation = Observation(
            app=app.id,
            account=app.account,
            version=version,
            next_version=new_id("ver"),
            fields={"open": msgspec.json.encode(after).decode(), "red": red, "yellow": len(after) - red},
            events=[queued_event(event, new_id("evt"), app.account, app.id, app.name) for event in events(telling)],
        )
        recorded = await scripts.observe(self._store, key, observation)
        if recorded and telling:
            logger.info(
                "monitor.told", type=SecurityFinding.type, app=app.id, account=app.account, findings=len(telling)
            )
        return recorded
