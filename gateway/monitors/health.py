"""Whether an app answers from outside, and when that is told.

    unknown ──answers──▶ healthy ◀──answers──╮
       ╰──────3 failures in a row──▶ unhealthy

`step` is pure: what is known, what a probe saw, the outcomes of deliveries that are known, and the time, in; what is
known from now on, and the events that follow, out. It keeps no clock and no connection, so that any worker goes on
where another stopped. What is known is kept as JSON beside its version; `of_apps` reads it for the account's page.

- A window is told as app.unhealthy once: at the third failure, or, while the cooldown since the last one runs, when
  that is over and the app still fails. A window that ends before was suppressed, and so is its recovery.
- The recovery of a window that was told is owed until the outcome of its app.unhealthy is known. Delivered: it is
  told. Any other, or none for a day: it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from gateway.accounts.records import Account, App
from gateway.events.catalogue import AppRecovered, AppUnhealthy, Event, Time
from gateway.ids import now_iso
from gateway.settings import Settings
from gateway.store import keys
from gateway.store.client import Store, backbone

FAILURES = 3  # in a row
READS = 4  # values per app
OWED = 100  # recoveries of one app; with the cooldown of 15 minutes a day has 96
OWED_FOR = 86_400_000  # ms; then the event itself has expired

Reason = Literal["", "dns", "connect", "tls", "timeout", "status"]  # empty: it answers
Status = Literal["unknown", "healthy", "unhealthy"]


class Owed(msgspec.Struct, frozen=True, array_like=True):
    """A recovery, for when the outcome of the app.unhealthy with this id is known. Times in ms."""

    event: str
    down_since: int
    up_at: int
    delivered: bool = False


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times in ms."""

    status: Status = "unknown"
    since: int = 0  # when the status began: for unhealthy with the first of the failures
    failures: int = 0  # in a row
    failing_since: int = 0
    reason: Reason = ""  # of the last failure in the row
    told: str = ""  # id of this window's app.unhealthy
    delivered: bool = False  # it was: remembered, because outcomes are for two days only
    told_at: int = 0  # when the last app.unhealthy was
    owed: tuple[Owed, ...] = ()

    @property
    def awaited(self) -> list[str]:
        """Ids of the events whose outcomes the next step asks for."""
        return [*([self.told] if self.told else []), *(each.event for each in self.owed)]


class OpenFindings(msgspec.Struct):
    red: int
    yellow: int


class MonitoredApp(msgspec.Struct):
    """What the monitors know of an app, as account holders see it."""

    status: Literal["live", "never-live"]
    health: Status
    healthSince: Time | None
    certificateExpiresAt: Time | None
    openFindings: OpenFindings


def step(
    health: Health,
    reason: Reason,
    outcomes: Mapping[str, str | None],
    now: int,
    *,
    url: str,
    cooldown: int,
    new_id: Callable[[], str],
) -> tuple[Health, list[tuple[str, Event]]]:
    """`outcomes`: event id → `waiting`, `delivered`, or one that means it did not arrive. Times in ms."""
    if health.told and outcomes.get(health.told) == "delivered":
        health = msgspec.structs.replace(health, delivered=True)
    health, events = _failed(health, reason, now, url, cooldown, new_id) if reason else (_answered(health, now), [])
    owed = []
    for each in health.owed:
        outcome = outcomes.get(each.event)
        if each.delivered or outcome == "delivered":
            events.append((new_id(), _recovered(each, url)))
        elif outcome == "waiting" and now - each.up_at < OWED_FOR:
            owed.append(each)
    return msgspec.structs.replace(health, owed=tuple(owed[-OWED:])), events


def _failed(
    health: Health, reason: Reason, now: int, url: str, cooldown: int, new_id: Callable[[], str]
) -> tuple[Health, list[tuple[str, Event]]]:
    health = msgspec.structs.replace(
        health,
        failures=health.failures + 1,
        failing_since=health.failing_since if health.failures else now,
        reason=reason,
    )
    if health.failures < FAILURES:
        return health, []
    health = msgspec.structs.replace(health, status="unhealthy", since=health.failing_since)
    if health.told or (health.told_at and now - health.told_at < cooldown):
        return health, []
    event_id = new_id()
    event = AppUnhealthy(url=url, failures=health.failures, reason=reason)
    return msgspec.structs.replace(health, told=event_id, told_at=now, delivered=False), [(event_id, event)]


def _answered(health: Health, now: int) -> Health:
    owed = health.owed
    if health.told:
        owed = (*owed, Owed(health.told, health.failing_since, now, health.delivered))
    since = health.since if health.status == "healthy" else now
    return Health(status="healthy", since=since, told_at=health.told_at, owed=owed)


def _recovered(owed: Owed, url: str) -> AppRecovered:
    return AppRecovered(url=url, downSince=now_iso(owed.down_since / 1000), downMs=owed.up_at - owed.down_since)


def watched(plan: str, live: bool) -> bool:
    """Probes are for live apps, from the Starter plan on."""
    return live and plan != "free"


def public_address(app: str, settings: Settings) -> str:
    """What is probed."""
    return settings.probe_url.replace("{app}", app).replace("{apps_domain}", settings.apps_domain)


def read(state: str | None) -> Health:
    return msgspec.json.decode(state, type=Health) if state else Health()


def shown(health: Health) -> tuple[Status, str | None]:
    """The status, and since when."""
    return health.status, now_iso(health.since / 1000) if health.since else None


async def of_apps(store: Store, account: Account, apps: Sequence[App]) -> list[MonitoredApp]:
    """In the order of `apps`."""
    tag = keys.tag(account.id)
    with backbone():
        async with store.client.pipeline(transaction=False) as pipeline:
            for app in apps:
                pipeline.hget(keys.site_key(account.id, app.id), "live")
                pipeline.hget(keys.health_key(tag, app.id), "state")
                pipeline.hget(keys.certificate_key(tag, app.id), "expiresAt")
                pipeline.hmget(keys.findings_key(tag, app.id), ["red", "yellow"])
            found = await pipeline.execute() if apps else []
    return [_monitored(account, *found[first : first + READS]) for first in range(0, len(found), READS)]


def _monitored(
    account: Account, live: str | None, state: str | None, expires: str | None, findings: Sequence[str | None]
) -> MonitoredApp:
    # An app that is no longer probed may still have the health of its last probe, until a worker removes it.
    status, since = shown(read(state if watched(account.plan, bool(live)) else None))
    red, yellow = findings
    return MonitoredApp(
        status="live" if live else "never-live",
        health=status,
        healthSince=since,
        certificateExpiresAt=now_iso(int(expires) / 1000) if expires else None,
        openFindings=OpenFindings(int(red or 0), int(yellow or 0)),
    )
