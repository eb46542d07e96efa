"""Keys of inference: rate windows, spend, permits and the provider's state.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `inference` | string | the runtime switch and the approval, JSON | never: one record |
| `provider` | string | the provider's health, JSON | never: one record |
| `probe` | string | id of the process that is probing the provider | 20 s |
| `provider-refusal` | string | exists while the provider refuses requests for lack of quota | 2 s |
| `{provider}:state` | hash | the state of all permits: `last` call, limit after a `cut`, … | 84 s after the last call |
| `{provider}:permits` | hash | process → permits granted and returned, end of its lease | each with its lease, 28 s |
| `{provider}:waiting` | hash | account → weight, and by process waiting requests and used permits | when none waits |
| `{provider}:order` | zset | waiting accounts by their virtual counter | when none waits |
| `{provider}:past` | zset | virtual counters of accounts that waited before | when none waits |
| `{provider}:leases` | zset | processes by the end of their lease, ms | each with its lease, 28 s |
| `{provider}:waiters` | zset | the same for processes with waiting requests | each with its lease, 28 s |
| `{provider}:quota` | hash | held and spent of the quota; process → its budget | 144 s after the last call |
| `{provider}:spent` | list | requests and tokens of the last minute, by second | each after a minute |
| `{pNN}:key-set:<app id>` | hash | the app's public keys, and when its backend sent them | 5 min |
| `{pNN}:key-set-claim:<app id>` | string | a process's claim to fetch them, with their address | 6 s |
| `{pNN}:window:app:<id>` | rate window | the app's admitted requests | 60 s |
| `{pNN}:window:user:<id>:<hash>` | rate window | the same for one user of the app | 60 s |
| `{pNN}:spend:<account>:<day>` | hash | nano-euro of the day: `settled`, `reserved`; `…:<app>`, `…:deleted` | 35 days |
| `{pNN}:spend-by-user:<account>:<app id>:<hash>:<day>` | hash | the same for a user, under a cap for users | 2 days |
| `{pNN}:reservations` | hash | reservation id → `<account> <day> <nano-euro> <app id>[ <hash>]` | each when settled |
| `{pNN}:leases` | zset | reservation ids by the end of their lease, ms | each when settled |
| `{pNN}:settled:<reservation>` | string | tombstone of a reservation: nano-euro settled | 11 min after its lease |
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from gateway.redis.partitions import CACHE_SIZE, partition_tag

INFERENCE_KEY = "inference"
PROVIDER_KEY = "provider"
PROBE_KEY = "probe"
REFUSAL_KEY = "provider-refusal"
PERMITS_KEY = "{provider}:permits"
WAITING_KEY = "{provider}:waiting"
LEASE_NAMES = ("state", "permits", "waiting", "order", "past", "leases", "waiters")
QUOTA_NAMES = ("quota", "spent")
PERMITS_CHANNEL = "permits"  # for all processes; each process also has its own, `permits:<process>`


def app_window_key(tag: str, app_id: str) -> str:
    return f"{tag}:window:app:{app_id}"


@lru_cache(CACHE_SIZE)
def user_hash(user: str) -> str:
    """Returns the hash that stands for a user's id in Redis, which never sees the id itself."""
    return hashlib.sha256(user.encode()).hexdigest()[:32]


def user_window_key(tag: str, app_id: str, hashed: str) -> str:
    return f"{tag}:window:user:{app_id}:{hashed}"


def key_set_keys(account_id: str, app_id: str) -> list[str]:
    """Returns the keys of the copy of an app's public keys, and of the claim to fetch them."""
    return [f"{partition_tag(account_id)}:{kind}:{app_id}" for kind in ("key-set", "key-set-claim")]


def reservation_keys(tag: str) -> list[str]:
    """Returns the keys of a partition's reservations, and of their leases."""
    return [f"{tag}:reservations", f"{tag}:leases"]


def settled_key(tag: str, reservation: str) -> str:
    return f"{tag}:settled:{reservation}"


def spend_prefix(tag: str) -> str:
    """Returns a prefix. Scripts append account and day or, for a user, `-by-user` and more; the slot stays the same."""
    return f"{tag}:spend"


def account_spend_prefix(account_id: str) -> str:
    """Returns a prefix to which a script appends the day; the slot stays the same."""
    return f"{spend_prefix(partition_tag(account_id))}:{account_id}"


def spend_key(account_id: str, day: str) -> str:
    return f"{account_spend_prefix(account_id)}:{day}"


def app_spend_fields(app_id: str) -> list[str]:
    """Returns the fields of an account's spend that hold the settled and the reserved money of one app."""
    return [f"settled:{app_id}", f"reserved:{app_id}"]


def user_spend_prefix(account_id: str, app_id: str, hashed: str) -> str:
    """Returns a prefix to which a script appends the day; the slot stays the same."""
    return f"{spend_prefix(partition_tag(account_id))}-by-user:{account_id}:{app_id}:{hashed}"


def permits_channel(process: str) -> str:
    return f"{PERMITS_CHANNEL}:{process}"


def lease_keys(*, rated: bool = False) -> list[str]:
    """Returns the keys of `lease.lua`, in its order. With a quota of the provider there are two more."""
    return [f"{{provider}}:{name}" for name in (*LEASE_NAMES, *(QUOTA_NAMES if rated else ()))]
