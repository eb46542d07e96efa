"""Keys of the data of apps: what they take, their snapshots, and the commands to the host that has them.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{pNN}:data:<account>:<app id>` | string | the bytes, state and problem that the app's host reports, JSON | 7 days |
| `{pNN}:data-snapshots:<account>:<app id>` | hash | snapshot id → the snapshot, JSON | with the app; 21 |
| `{pNN}:data-snapshots-made:<app id>` | string | number of snapshots that its account has asked for | 1 hour |
| `{pNN}:data-deleted:<account>` | hash | record id → a deleted app and its snapshots, JSON | 8 days |
| `{pNN}:data-deleted` | zset | `<account> <record id>` by the time of the deletion, ms | each after 7 days |
| `{pNN}:data-commands` | hash | `<account> <id>` → a command to the host of an app's data, JSON | 7 days; 1,000 |
| `{pNN}:data-answer:<command id>` | string | the host's answer to a command, JSON | 1 hour |
"""

from __future__ import annotations

from gateway.redis.partitions import keys_in_account, keys_of_account, keys_of_partition, partition_tag


def status_key(account_id: str, app_id: str) -> str:
    """Includes the account, because an app of the same id may later belong to another one."""
    return f"{partition_tag(account_id)}:data:{account_id}:{app_id}"


def snapshots_key(account_id: str, app_id: str) -> str:
    """Includes the account, for the same reason."""
    return f"{partition_tag(account_id)}:data-snapshots:{account_id}:{app_id}"


snapshots_made_key = keys_in_account("data-snapshots-made")
answer_key = keys_in_account("data-answer")
deleted_key = keys_of_account("data-deleted")
deletions_key = keys_of_partition("data-deleted")
commands_key = keys_of_partition("data-commands")
