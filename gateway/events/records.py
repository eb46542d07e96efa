"""The arguments and replies of the scripts that deliver events."""

from typing import Literal

import msgspec

Outcome = Literal["delivered", "failed", "dropped"]  # of a delivery


class QueuedEvent(msgspec.Struct, frozen=True):
    """An event as it waits in its partition's stream."""

    id: str
    account: str
    app: str  # the app's name
    type: str
    data: str  # JSON
    sample: bool = False
    redelivery: int = 0  # number of its redeliveries, this one included


class RequestReply(msgspec.Struct, frozen=True):
    verdict: Literal["queued", "dropped", "rate", "unknown"]
    retry_in: int  # microseconds until the account's next request can pass


class LoggedEvent(msgspec.Struct, frozen=True):
    """An event of an account's log."""

    id: str
    app: str  # the app's name
    type: str
    sample: bool
    redelivery: int  # number of its redeliveries
    entries: int  # of the log


class EntryOwnership(msgspec.Struct, frozen=True):
    owned: bool  # this worker may send the event
    receiver: str  # the account's receiver, JSON; '' if none is set
    data: str  # the event's, JSON; '' if it is no longer stored
    previous_secret: str  # the receiver's, encrypted, while it still signs; or ''
    attempt: int = 0  # from 1; higher after a worker died with the event, or failed on it


class DeliveryResult(msgspec.Struct, frozen=True):
    """The result of a delivery."""

    outcome: Outcome
    status: int | None = None  # of the receiver's answer
    reason: str = ""
    url: str = ""  # to which the event was sent
    headers: str = ""  # of the answer, JSON
    body: str = ""  # the beginning of the answer's


class QueuedNotice(msgspec.Struct, frozen=True):
    """A notice by e-mail as it waits in its partition's stream."""

    account: str
    kind: str  # that an address may want
    type: str  # decides the text
    app: str  # the app's name; '' for the whole account
    data: str  # JSON
    address: str = ""  # hash of the only address that gets it; '' for all that want the kind


class NoticeClaim(msgspec.Struct, frozen=True):
    owned: bool  # this worker may send the notice
    subscriber: str  # who gets it, JSON; '' for an address that gets none any more


def flatten_event(event: QueuedEvent) -> tuple[str, str, str, str, str]:
    return event.id, event.account, event.app, event.type, event.data


def flatten_marks(*, sample: bool, redelivery: int) -> tuple[str, str]:
    return "1" if sample else "", str(redelivery or "")
