"""Keys of inference: windows, spend, permits and what is known about the provider.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `inference` | string | the runtime switch and the approval, JSON | never: one record |
| `provider` | string | what is known about the provider's state, JSON | never: one record |
| `probe` | string | id of the process that is probing the provider | 20 s |
| `{provider}:state` | hash | the state of all permits: `last` call, bound after a `cut`, … | 84 s after the last call |
| `{provider}:permits` | hash | process → permits granted and returned, end of its lease | each with its lease, 28 s |
| `{provider}:waiting` | hash | account → its weight, and by process what waits and what is in use | when none waits |
| `{provider}:turns` | zset | waiting accounts by their virtual counter | when none waits |
| `{provider}:past` | zset | virtual counters of accounts that waited before | when none waits |
| `{provider}:leases` | zset | processes by the end of their lease, ms | each with its lease, 28 s |
| `{provider}:waiters` | zset | the same of the processes in which requests wait | each with its lease, 28 s |
| `{provider}:rate` | hash | held and spent of the quota; process → its budget | 144 s after the last call |
| `{provider}:spent` | list | requests and tokens of the last minute, by second | each after a minute |
| `{pNN}:key-set:<app id>` | hash | the app's public keys as its backend gave them, and when | 5 min |
| `{pNN}:key-set-claim:<app id>` | string | that a process fetches them, and for which address | 6 s |
| `{pNN}:window:app:<id>` | list | times of the app's admitted requests in the last minute, µs | 60 s |
| `{pNN}:window:user:<id>:<hash>` | list | the same for one user of the app | 60 s |
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
LEASE_NAMES = ("state", "permits", "waiting", "turns", "past", "leases", "waiters")
QUOTA_NAMES = ("rate", "spent")
PERMITS_CHANNEL = "permits"  # channel; `permits:<process>` is one process's


def app_window_key(tag: str, app_id: str) -> str:
    return f"{tag}:window:app:{app_id}"


@lru_cache(CACHE_SIZE)
def user_hash(user: str) -> str:
    """The user's id is the app's affair: Redis sees only its hash."""
    return hashlib.sha256(user.encode()).hexdigest()[:32]


def user_window_key(tag: str, app_id: str, hashed: str) -> str:
    return f"{tag}:window:user:{app_id}:{hashed}"


def key_set_keys(account_id: str, app_id: str) -> list[str]:
    """The copy of an app's public keys, and the claim to fetch them."""
    return [f"{partition_tag(account_id)}:{kind}:{app_id}" for kind in ("key-set", "key-set-claim")]


def reservation_keys(tag: str) -> list[str]:
    """Reservations, their leases."""
    return [f"{tag}:reservations", f"{tag}:leases"]


def settled_key(tag: str, reservation: str) -> str:
    return f"{tag}:settled:{reservation}"


def spend_prefix(tag: str) -> str:
    """The scripts append account and day, or `-by-user` and what follows there, in the same slot."""
    return f"{tag}:spend"


def account_spend_prefix(account_id: str) -> str:
    """The day is appended, in the same slot."""
    return f"{spend_prefix(partition_tag(account_id))}:{account_id}"


def spend_key(account_id: str, day: str) -> str:
    return f"{account_spend_prefix(account_id)}:{day}"


def app_spend_fields(app_id: str) -> list[str]:
    """Of the account's spend: what is settled and reserved for one of its apps."""
    return [f"settled:{app_id}", f"reserved:{app_id}"]


def user_spend_prefix(account_id: str, app_id: str, hashed: str) -> str:
    """The day is appended, in the same slot."""
    return f"{spend_prefix(partition_tag(account_id))}-by-user:{account_id}:{app_id}:{hashed}"


def permits_channel(process: str) -> str:
    return f"{PERMITS_CHANNEL}:{process}"


def permits_key() -> str:
    return "{provider}:permits"


def waiting_key() -> str:
    return "{provider}:waiting"


def lease_keys(*, rated: bool = False) -> list[str]:
    """What `lease.lua` needs, in its order; with a quota of the provider's two more."""
    return [f"{{provider}}:{name}" for name in (*LEASE_NAMES, *(QUOTA_NAMES if rated else ()))]
