"""Decides from probes whether an app is healthy, and when its account is notified.

    unknown ──answers──▶ healthy ◀──answers──╮
       ╰──────3 failures in a row──▶ unhealthy

`step` is pure: it takes the state, the result of a probe, the known outcomes of deliveries and the time, and returns
the next state and the events that follow. It has no clock and no connection, so any worker can continue where another
one stopped. The state is stored as JSON with its version; `read_monitored_apps` reads it for the account's page.

- The account is notified of each outage once, by app.unhealthy: at the third failure or, if the last notification was
  within the cooldown, as soon as the cooldown is over and the app still fails. An outage that ends before then is not
  reported, nor is its recovery.
- When a reported outage ends, its app.recovered waits for the outcome of its app.unhealthy. It is sent when the
  app.unhealthy was delivered. It is discarded when the delivery failed, or when there is no outcome for a day.
- While an app is not probed, its health is unknown. A reported outage waits: it is not reported again, and it ends with
  the first probe that the app answers. The cooldown continues.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from gateway.accounts.records import Account, App, find_suspension
from gateway.events.catalog import AppRecovered, AppUnhealthy, Event
from gateway.ids import Time, now_iso
from gateway.keys import certificate_key, findings_key, health_key, partition_tag, site_key
from gateway.redis.client import Store
from gateway.settings import Settings

FAILURES = 3  # in a row
VALUES = 4  # that are read per app
MAX_PENDING = 100  # recoveries per app; a cooldown of 15 minutes allows at most 96 per day
PENDING_MS = 86_400_000  # after which the app.unhealthy itself has expired

Reason = Literal["", "dns", "connect", "tls", "timeout", "status"]  # empty: the app answers
HealthStatus = Literal["unknown", "healthy", "unhealthy"]


class PendingRecovery(msgspec.Struct, frozen=True, array_like=True):
    """A recovery that waits for the outcome of the app.unhealthy with this id. Times in ms."""

    event: str
    down_since: int
    up_at: int
    delivered: bool = False


class AppHealth(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times in ms."""

    status: HealthStatus = "unknown"
    since: int = 0  # start of the status: unhealthy begins with the first of the failures
    failures: int = 0  # in a row
    failing_since: int = 0
    reason: Reason = ""  # of the last failure in the row
    notified: str = ""  # id of this outage's app.unhealthy
    delivered: bool = False  # the app.unhealthy; stored because outcomes are kept for two days only
    notified_at: int = 0  # time of the last app.unhealthy
    pending: tuple[PendingRecovery, ...] = ()

    @property
    def awaited(self) -> list[str]:
        """The ids of the events whose outcomes the next step needs."""
        return [*([self.notified] if self.notified else []), *(each.event for each in self.pending)]


class OpenFindings(msgspec.Struct):
    red: int
    yellow: int


class MonitoredApp(msgspec.Struct):
    """An app and its state in the monitors, as account holders and operators see it."""

    id: str
    name: str
    status: Literal["live", "never-live"]
    health: HealthStatus
    healthSince: Time | None
    certificateExpiresAt: Time | None
    openFindings: OpenFindings


def step(
    health: AppHealth,
    reason: Reason,
    outcomes: Mapping[str, str | None],
    now: int,
    *,
    url: str,
    cooldown: int,
    new_id: Callable[[], str],
) -> tuple[AppHealth, list[tuple[str, Event]]]:
    """Returns the next state, and the events that follow with their ids. Times in ms.

    `outcomes` by event id are `waiting`, `delivered`, or another text when the event did not arrive.
    """
    if health.notified and outcomes.get(health.notified) == "delivered":
        health = msgspec.structs.replace(health, delivered=True)
    events: list[tuple[str, Event]] = []
    if reason:
        health, events = _record_failure(health, reason, now, url, cooldown, new_id)
    else:
        health = _record_answer(health, now)
    pending = []
    for each in health.pending:
        outcome = outcomes.get(each.event)
        if each.delivered or outcome == "delivered":
            since = now_iso(each.down_since / 1000)
            events.append((new_id(), AppRecovered(url=url, downSince=since, downMs=each.up_at - each.down_since)))
        elif outcome == "waiting" and now - each.up_at < PENDING_MS:
            pending.append(each)
    return msgspec.structs.replace(health, pending=tuple(pending[-MAX_PENDING:])), events


def _record_failure(
    health: AppHealth, reason: Reason, now: int, url: str, cooldown: int, new_id: Callable[[], str]
) -> tuple[AppHealth, list[tuple[str, Event]]]:
    health = msgspec.structs.replace(
        health,
        failures=health.failures + 1,
        failing_since=health.failing_since if health.failures or health.notified else now,
        reason=reason,
    )
    if health.failures < FAILURES:
        return health, []
    health = msgspec.structs.replace(health, status="unhealthy", since=health.failing_since)
    if health.notified or (health.notified_at and now - health.notified_at < cooldown):
        return health, []
    event_id = new_id()
    event = AppUnhealthy(url=url, failures=health.failures, reason=reason)
    return msgspec.structs.replace(health, notified=event_id, notified_at=now, delivered=False), [(event_id, event)]


def _record_answer(health: AppHealth, now: int) -> AppHealth:
    pending = health.pending
    if health.notified:
        pending = (*pending, PendingRecovery(health.notified, health.failing_since, now, health.delivered))
    since = health.since if health.status == "healthy" else now
    return AppHealth(status="healthy", since=since, notified_at=health.notified_at, pending=pending)


def pause(health: AppHealth) -> AppHealth:
    """Returns what is kept of an app's health while the app is not probed."""
    return AppHealth(
        failing_since=health.failing_since,
        notified=health.notified,
        delivered=health.delivered,
        notified_at=health.notified_at,
        pending=health.pending,
    )


def is_probed(plan: str, live: bool) -> bool:
    """Returns whether an app is probed: only live apps are, from the Starter plan on."""
    return live and plan != "free"


def public_address(app: str, settings: Settings) -> str:
    """Returns the address to probe."""
    return settings.probe_url.replace("{app}", app).replace("{apps_domain}", settings.apps_domain)


def decode_health(state: str | None) -> AppHealth:
    return msgspec.json.decode(state, type=AppHealth) if state else AppHealth()


def status_and_since(health: AppHealth) -> tuple[HealthStatus, str | None]:
    return health.status, now_iso(health.since / 1000) if health.since else None


async def read_monitored_apps(store: Store, apps: Sequence[tuple[App, Account]]) -> list[MonitoredApp]:
    """Returns the state of these apps, in the same order."""
    async with store.client.pipeline(transaction=False) as pipeline:
        for app, account in apps:
            tag = partition_tag(account.id)
            pipeline.hget(site_key(account.id, app.id), "live")
            pipeline.hget(health_key(tag, app.id), "state")
            pipeline.hget(certificate_key(tag, app.id), "expiresAt")
            pipeline.hmget(findings_key(tag, app.id), ["red", "yellow"])
        found = await pipeline.execute() if apps else []
    answers = [found[first : first + VALUES] for first in range(0, len(found), VALUES)]
    return [_monitored(app, account, *answer) for (app, account), answer in zip(apps, answers, strict=True)]


def _monitored(
    app: App, account: Account, live: str | None, state: str | None, expires: str | None, findings: Sequence[str | None]
) -> MonitoredApp:
    # An app that is no longer probed may still have the health of its last probe, until a worker removes it.
    probed = is_probed(account.plan, bool(live)) and find_suspension(app, account) is None
    status, since = status_and_since(decode_health(state if probed else None))
    red, yellow = findings
    return MonitoredApp(
        id=app.id,
        name=app.name,
        status="live" if live else "never-live",
        health=status,
        healthSince=since,
        certificateExpiresAt=now_iso(int(expires) / 1000) if expires else None,
        openFindings=OpenFindings(int(red or 0), int(yellow or 0)),
    )
