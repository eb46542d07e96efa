"""The scripts that queue, claim and record deliveries of events."""

from collections.abc import Mapping, Sequence

import msgspec

from gateway.accounts.access import Right
from gateway.events.records import (
    DeliveryResult,
    EntryOwnership,
    LoggedEvent,
    NoticeClaim,
    QueuedEvent,
    QueuedNotice,
    RequestReply,
    flatten_event,
    flatten_marks,
)
from gateway.keys import (
    awaited_key,
    bodies_key,
    dead_letters_key,
    deletions_key,
    deliveries_key,
    emitted_key,
    event_keys,
    events_window_key,
    invitations_key,
    mail_outcomes_key,
    members_key,
    noticed_key,
    notices_key,
    partition_tag,
    previous_secret_key,
    stored_key,
    stream_key,
    webhook_key,
)
from gateway.redis.client import Script, Store

_EMIT_EVENT = Script("events/emit_event")
_REQUEST_EVENT = Script("events/request_event", durable=True)
_REDELIVER_EVENTS = Script("events/redeliver_events", durable=True)
_CLAIM_DELIVERY = Script("events/claim_delivery")
_RECORD_DELIVERY = Script("events/record_delivery")
_DEAD_LETTER = Script("events/dead_letter")
_FORGET_STORED_BYTES = Script("events/forget_stored_bytes")
_QUEUE_NOTICE = Script("events/queue_notice")
_CLAIM_NOTICE = Script("events/claim_notice")
_RECORD_NOTICE = Script("events/record_notice")


async def emit_event(store: Store, event: QueuedEvent, *, once: bool = False) -> None:
    """Queues an event. With `once`, a second call with the same id within an hour changes nothing."""
    marker = [emitted_key(event.account, event.id)] if once else []
    script_keys = [*event_keys(partition_tag(event.account), event.account), *marker]
    await store.run_script(_EMIT_EVENT, script_keys, *flatten_event(event))


async def request_event(
    store: Store, account: str, event: str, sample: QueuedEvent | None, *, limit: int
) -> RequestReply:
    """Queues a sample, or the event of this id from the account's log, if fewer than `limit` passed in 60 seconds."""
    script_keys = [*event_keys(partition_tag(account), account), events_window_key(account)]
    content = () if sample is None else (sample.app, sample.type, sample.data)
    verdict, retry_in = await store.run_script(_REQUEST_EVENT, script_keys, limit, event, account, *content)
    return RequestReply(verdict, int(retry_in))


async def redeliver_events(store: Store, account: str, events: Sequence[LoggedEvent]) -> int:
    """Queues again the events that do not wait already, while there is room; returns their number."""
    script_keys = event_keys(partition_tag(account), account)
    args: list[str | int] = [account]
    for event in events:
        marks = flatten_marks(sample=event.sample, redelivery=event.redelivery + 1)
        args += [event.id, event.app, event.type, *marks, event.entries]
    return int(await store.run_script(_REDELIVER_EVENTS, script_keys, *args))


async def claim_delivery(
    store: Store, tag: str, account: str, event: str, *, group: str, consumer: str, entry: str
) -> EntryOwnership:
    """Confirms that an entry of the partition's events belongs to this consumer, and restarts its idle time."""
    script_keys = [stream_key(tag, "events"), webhook_key(account), bodies_key(account)]
    script_keys += [previous_secret_key(account), deletions_key(tag)]
    owned, *found = await store.run_script(_CLAIM_DELIVERY, script_keys, group, consumer, entry, event, account)
    return EntryOwnership(bool(owned), *found)


async def record_delivery(
    store: Store,
    tag: str,
    event: QueuedEvent,
    result: DeliveryResult,
    *,
    group: str,
    entry: str,
    at: int,
    duration: int,
) -> bool:
    """Logs the result of a delivery and removes the event from the stream; False if another worker has done so.

    The delivery began `at` (ms since the epoch), and took `duration` (ms).
    """
    script_keys = [*event_keys(tag, event.account), awaited_key(tag, event.id)]
    status = "" if result.status is None else result.status
    fields = event.id, event.account, event.app, event.type, result.outcome, at, duration, status, result.reason
    answer = result.url, result.headers, result.body
    marks = flatten_marks(sample=event.sample, redelivery=event.redelivery)
    return bool(await store.run_script(_RECORD_DELIVERY, script_keys, group, entry, *fields, *answer, *marks))


async def dead_letter(
    store: Store,
    tag: str,
    stream: str,
    fields: Mapping[str, str],
    event: QueuedEvent | None,
    *,
    group: str,
    entry: str,
    reason: str,
) -> bool:
    """Moves an entry to the partition's dead letters; False if it is already finished.

    If `event` is given, the account's log records it as failed.
    """
    dead = msgspec.json.encode({name[:64]: value[:256] for name, value in list(fields.items())[:16]}).decode()
    script_keys, about = [stream_key(tag, stream), dead_letters_key(tag)], []
    if event is not None:
        script_keys += event_keys(tag, event.account)[1:]
        marks = flatten_marks(sample=event.sample, redelivery=event.redelivery)
        about = [event.id, event.account, event.app, event.type, *marks]
    return bool(await store.run_script(_DEAD_LETTER, script_keys, group, entry, stream, reason, dead, *about))


async def forget_stored_bytes(store: Store, account: str) -> bool:
    """Removes the byte count of the account's log and bodies; False while one of them exists."""
    script_keys = [deliveries_key(account), bodies_key(account), stored_key(partition_tag(account))]
    return bool(await store.run_script(_FORGET_STORED_BYTES, script_keys, account))


async def queue_notice(store: Store, notice: QueuedNotice, subject: str, level: int, *, mark_seconds: int) -> int:
    """Queues a notice for its address, or for each that wants it, unless this subject and level were queued before.

    Returns the number of addresses, or -1 if too many notices wait.
    """
    account, tag = notice.account, partition_tag(notice.account)
    script_keys = [notices_key(account), stream_key(tag, "mails"), noticed_key(account, subject), deletions_key(tag)]
    args = (account, notice.kind, level, mark_seconds, notice.type, notice.app, notice.data, notice.address)
    return int(await store.run_script(_QUEUE_NOTICE, script_keys, *args))


async def claim_notice(
    store: Store, tag: str, account: str, address: str, kind: str, *, group: str, consumer: str, entry: str
) -> NoticeClaim:
    """Confirms that a notice belongs to this consumer, and restarts its idle time. `address` is a hash."""
    script_keys = [stream_key(tag, "mails"), notices_key(account), deletions_key(tag), members_key(account)]
    script_keys.append(invitations_key(account))
    args = (group, consumer, entry, account, address, kind, *sorted(Right.DEVELOP.roles))
    owned, subscriber = await store.run_script(_CLAIM_NOTICE, script_keys, *args)
    return NoticeClaim(bool(owned), subscriber)


async def record_notice(store: Store, tag: str, *, group: str, entry: str, outcome: str) -> bool:
    """Counts the outcome of a notice and removes it from the stream; False if another worker has done so."""
    script_keys = [stream_key(tag, "mails"), mail_outcomes_key(tag)]
    return bool(await store.run_script(_RECORD_NOTICE, script_keys, group, entry, outcome))
