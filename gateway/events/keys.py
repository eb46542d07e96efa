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

from gateway.redis.partitions import keys_in_account, keys_in_partition, keys_of_account, keys_of_partition, stream_key

webhook_key = keys_of_account("webhook")
previous_secret_key = keys_of_account("previous-secret")
redelivered_key = keys_of_account("redelivered")
events_window_key = keys_of_account("window:events")
deliveries_key = keys_of_account("deliveries")
emitted_key = keys_in_account("emitted")

outcomes_key = keys_of_partition("outcomes")
dead_letters_key = keys_of_partition("dead")
stored_key = keys_of_partition("events:stored")  # the scripts build it from the events' key
awaited_prefix = keys_of_partition("awaited")
awaited_key = keys_in_partition("awaited")


def bodies_key(account_id: str) -> str:
    """Returns the key of the data of the account's events. The scripts build it from the log's key."""
    return f"{deliveries_key(account_id)}:bodies"


def event_keys(tag: str, account_id: str) -> list[str]:
    """Returns the keys of a script that queues an event.

    These are the partition's events, the account's log, the partition's outcomes, and two more. The scripts
    build the names of the last two themselves. The call declares them because, while a slot migrates, Redis runs a
    script only on the node that has all declared keys.
    """
    log, bodies = deliveries_key(account_id), bodies_key(account_id)
    return [stream_key(tag, "events"), log, outcomes_key(tag), bodies, stored_key(tag)]
