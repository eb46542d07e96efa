"""The types of events and the fields of their data, as classes, so that a wrong field cannot be sent.

Names and formats are part of the public interface. Times are ISO 8601 UTC with milliseconds and Z.

To add a type, define its class, whose docstring says when it is sent, and add a sample. docs/webhooks.md is made from
both. The API, the command line and the dashboard list the types of `SAMPLES`.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.events.records import QueuedEvent
from gateway.ids import Time, now_iso

Kind = Literal["live", "preview"]
Phase = Literal["build", "health", "canary"]
HttpsUrl = Annotated[str, msgspec.Meta(pattern="^https://")]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all events."""

    type: ClassVar[str]
    sample: bool | msgspec.UnsetType = msgspec.UNSET  # true for a test event


class DeploySucceeded(Event, frozen=True, kw_only=True):
    """A deploy ended with its release in service; a live one only after its canary has passed.

    A deploy sends this event or `deploy.failed`, exactly once. A canceled deploy sends none.
    """

    type: ClassVar[str] = "deploy.succeeded"
    deployId: str
    url: HttpsUrl  # always the auto-assigned address
    durationMs: int
    kind: Kind
    plan: str | msgspec.UnsetType = msgspec.UNSET


class DeployFailed(Event, frozen=True, kw_only=True):
    """A deploy ended without its release in service."""

    type: ClassVar[str] = "deploy.failed"
    deployId: str
    kind: Kind
    phase: Phase
    reason: str


class AppCrashed(Event, frozen=True, kw_only=True):
    """The app's start command ended or ran out of memory.

    An app that ended because its machine or the container was restarted has not crashed.
    """

    type: ClassVar[str] = "app.crashed"
    reason: Literal["exit", "oom"]
    exitCode: int | None
    at: Time


class AppUnhealthy(Event, frozen=True, kw_only=True):
    """Three probes of the app's public address failed in a row.

    Live apps on the Starter plan and above are probed once a minute, from outside.

    - `reason` describes the last failure: `dns`, `connect`, `tls`, `timeout` (10 seconds) or `status`: the answer to
      the app's [health check](deploys.md#health-check) is not what it should be. Of files, only a 5xx is.
    - An app gets at most one `app.unhealthy` every 15 minutes. If it fails again within that time, the next event is
      sent only if the app is still failing when the 15 minutes are over. Otherwise neither `app.unhealthy` nor
      `app.recovered` is sent.
    - `app.crashed` is independent: one incident can cause both events.
    """

    type: ClassVar[str] = "app.unhealthy"
    url: str
    failures: int
    reason: str


class AppRecovered(Event, frozen=True, kw_only=True):
    """The app responds again, and your receiver accepted its `app.unhealthy` with 2xx.

    If that event was suppressed or not delivered, no `app.recovered` is sent. `downSince` is the time of the first
    failed probe. `downMs` is the time from then to the first successful one. The service waits up to a day for the
    outcome of the `app.unhealthy`, so `app.recovered` may be sent some time after the recovery. If you redeliver the
    `app.unhealthy` successfully within a day and before the app responds again, it counts as delivered.
    """

    type: ClassVar[str] = "app.recovered"
    url: str
    downSince: Time
    downMs: int


class DomainExpiring(Event, frozen=True, kw_only=True):
    """The certificate of a verified custom domain expires within 7 days, or has expired.

    The event is sent once per certificate, so a renewed certificate is reported again when it is about to expire. If
    the domain loses its verification and is verified again, its certificate is reported again, too. `daysLeft` is in
    whole days, at least 0. Certificates are checked daily.
    """

    type: ClassVar[str] = "domain.expiring"
    domain: str
    expiresAt: Time
    daysLeft: int


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    cve: str
    component: str
    severity: str
    fixedIn: str | None
    tier: Literal["red", "yellow"]
    deadlineAt: Time | None


class SecurityFinding(Event, frozen=True, kw_only=True):
    """A scan of a live app contains red findings that have not been reported yet.

    One event carries all of them, or several events if they do not fit into one. A finding that disappears from a scan
    and returns is reported again. Yellow findings are never sent; `GET /account/apps` counts them.
    """

    type: ClassVar[str] = "security.finding"
    tier: Literal["red"] = "red"
    findings: list[Finding]


DAY_SECONDS = 86_400


def build_samples(plan: str, now: float, host: str) -> dict[str, Event]:
    """Returns a sample of each event type, as an account on this plan gets it at `now`, in seconds since the epoch.

    `host` is that of the app's address.
    """
    at = now_iso(now)
    events = (
        DeploySucceeded(deployId="dep_sample", url=f"https://{host}", durationMs=42_000, kind="live", plan=plan),
        DeployFailed(deployId="dep_sample", kind="live", phase="build", reason="the build command ended with status 1"),
        AppCrashed(reason="exit", exitCode=1, at=at),
        AppUnhealthy(url=f"https://{host}/", failures=3, reason="timeout"),
        AppRecovered(url=f"https://{host}/", downSince=now_iso(now - 180), downMs=180_000),
        DomainExpiring(domain="app.example.com", expiresAt=now_iso(now + 6.5 * DAY_SECONDS), daysLeft=6),
        SecurityFinding(
            findings=[
                Finding(
                    cve="CVE-2026-0001",
                    component="example@1.0.0",
                    severity="critical",
                    fixedIn="1.0.1",
                    tier="red",
                    deadlineAt=now_iso(now + 7 * DAY_SECONDS),
                )
            ]
        ),
    )
    return {event.type: msgspec.structs.replace(event, sample=True) for event in events}


# By type, as the documentation shows them. Of 2026-01-01.
SAMPLES = build_samples("free", 1_767_225_600, "sample.apps.example.com")


def prepare_event(event: Event, event_id: str, account: str, app_id: str, app_name: str) -> QueuedEvent:
    """Returns the event as it is queued. Raises msgspec.ValidationError for a value of the wrong type."""
    return QueuedEvent(event_id, account, app_name, event.type, encode_data(event, app_id, app_name).decode())


def encode_data(event: Event, app_id: str, app_name: str) -> bytes:
    """Returns the event's `data` as JSON. Raises msgspec.ValidationError for a value of the wrong type."""
    fields = msgspec.to_builtins(event)
    msgspec.convert(fields, type(event))  # constructing a struct does not check the types of its values
    return msgspec.json.encode({"appId": app_id, "appName": app_name, **fields})
