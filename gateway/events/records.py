"""What the scripts of event deliveries take and answer."""

from __future__ import annotations

from typing import Literal

import msgspec


class QueuedEvent(msgspec.Struct, frozen=True):
    """An event as it waits in its partition's stream."""

    id: str
    account: str
    app: str  # the app's name
    type: str
    data: str  # JSON
    sample: bool = False
    redelivery: int = 0  # how often it was redelivered, with this time


class Requested(msgspec.Struct, frozen=True):
    verdict: Literal["queued", "dropped", "rate", "unknown"]
    retry_in: int  # microseconds until the account's next request can pass


class LoggedEvent(msgspec.Struct, frozen=True):
    """An event of an account's log."""

    id: str
    app: str  # the app's name
    type: str
    sample: bool
    redelivery: int  # how often it was redelivered, 0 for never
    entries: int  # of the log


class Ownership(msgspec.Struct, frozen=True):
    owned: bool  # the event is this worker's to send
    receiver: str  # the account's receiver, JSON; '' if none is set
    data: str  # the event's, JSON; '' if it is no longer stored
    previous_secret: str  # the receiver's, encrypted, for as long as it signs too; or ''
    attempt: int = 0  # from 1; more after a worker died with the event, or a fault of ours


class Delivery(msgspec.Struct, frozen=True):
    """How the delivery of an event ended."""

    outcome: Literal["delivered", "failed", "dropped"]
    at: int  # ms since the epoch
    duration: int  # ms
    status: int | None  # of the receiver's answer
    reason: str  # '' for none
    url: str = ""  # where it was sent to
    headers: str = ""  # of the answer, JSON
    body: str = ""  # the beginning of the answer's


def flat_event(event: QueuedEvent) -> tuple[str, str, str, str, str]:
    return event.id, event.account, event.app, event.type, event.data


def flat_marks(*, sample: bool, redelivery: int) -> tuple[str, str]:
    return "1" if sample else "", str(redelivery or "")


def flat_delivery(delivery: Delivery) -> tuple[str | int, ...]:
    status = "" if delivery.status is None else delivery.status
    outcome = (delivery.outcome, delivery.at, delivery.duration, status, delivery.reason)
    return *outcome, delivery.url, delivery.headers, delivery.body
