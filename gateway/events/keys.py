"""Keys of events, their deliveries and their receivers.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{pNN}:webhook:<account>` | string | the account's receiver, JSON; its secret is encrypted | when it is cleared |
| `{pNN}:previous-secret:<account>` | string | the secret before the last rotation, encrypted | 24 h |
| `{pNN}:events` | stream | events without an outcome yet; group `webhooks` | each at its outcome; 100,000 |
| `{pNN}:events:stored` | zset | account → bytes of its bodies and its log | never: one number per account |
| `{pNN}:deliveries:<account>` | stream | outcomes of the last 1,000 deliveries, each with the answer | 30 days |
| `{pNN}:deliveries:<account>:bodies` | hash | event id → its data, JSON; with the log at most 8 MiB | 30 days |
| `{pNN}:dead` | stream | entries that no worker could process, the last 100 | 30 days |
| `{pNN}:window:events:<account>` | rate window | its test events and redeliveries | 60 s |
| `{pNN}:redelivered:<account>` | string | mark that all failed events were sent again | 60 s |
| `{pNN}:outcomes` | hash | outcome → number of deliveries | never: a dozen fields |
| `{pNN}:emitted:<event id>` | string | mark of a queued event, so that queueing it again changes nothing | 1 hour |
| `{pNN}:awaited:<event id>` | string | outcome of an `app.unhealthy`, on which its `app.recovered` depends | 2 days |
"""

from __future__ import annotations

from gateway.redis.partitions import partition_tag, stream_key


def events_window_key(account_id: str) -> str:
    return f"{partition_tag(account_id)}:window:events:{account_id}"


def outcomes_key(tag: str) -> str:
    return f"{tag}:outcomes"


def event_keys(tag: str, account_id: str) -> list[str]:
    """Returns the keys of a script that queues an event.

    These are the partition's events, the account's log, the partition's outcomes, and two more. The scripts
    build the names of the last two themselves. The call declares them because, while a slot migrates, Redis runs a
    script only on the node that has all declared keys.
    """
    return [
        stream_key(tag, "events"),
        deliveries_key(account_id),
        outcomes_key(tag),
        bodies_key(account_id),
        stored_key(tag),
    ]


def webhook_key(account_id: str) -> str:
    return f"{partition_tag(account_id)}:webhook:{account_id}"


def previous_secret_key(account_id: str) -> str:
    return f"{partition_tag(account_id)}:previous-secret:{account_id}"


def redelivered_key(account_id: str) -> str:
    return f"{partition_tag(account_id)}:redelivered:{account_id}"


def deliveries_key(account_id: str) -> str:
    return f"{partition_tag(account_id)}:deliveries:{account_id}"


def bodies_key(account_id: str) -> str:
    """Returns the key of the data of the account's events. The scripts build it from the log's key."""
    return f"{deliveries_key(account_id)}:bodies"


def stored_key(tag: str) -> str:
    """Returns the key of the sizes of the accounts' bodies and logs. The scripts build it from the events' key."""
    return f"{stream_key(tag, 'events')}:stored"


def dead_letters_key(tag: str) -> str:
    return f"{tag}:dead"


def emitted_key(account_id: str, event_id: str) -> str:
    return f"{partition_tag(account_id)}:emitted:{event_id}"


def awaited_prefix(tag: str) -> str:
    return f"{tag}:awaited"


def awaited_key(tag: str, event_id: str) -> str:
    return f"{awaited_prefix(tag)}:{event_id}"
