"""Every key in Redis.

| key | type | holds | ends |
| --- | --- | --- | --- |
| `app:<name>` | string | an app's record, JSON | when the app is deleted |
| `alias:<id>` | string | the name of the app of this id, when they differ | when the app is deleted |
| `key:<sha256>` | string | the account an API key belongs to | when the key is withdrawn |
| `inference` | string | the runtime switch and the approval, JSON | never: one record |
| `provider` | string | what was learnt of the provider, JSON | never: one record |
| `probe` | string | which process probes the provider now | 20 s |
| `{provider}:state` | hash | of all permits: `last` call, bound after a `cut`, `tight` | 84 s without a gateway |
| `{provider}:permits` | hash | process → permits granted and returned, its lease | each with its lease, 28 s |
| `{provider}:waiting` | hash | account → its weight, and its waiting requests by process | when none waits |
| `{provider}:turns` | zset | accounts that wait, by their virtual counter | when none waits |
| `{provider}:past` | zset | counters of accounts that waited, until nobody waits | 84 s without a gateway |
| `{pNN}:account:<id>` | string | an account's record, JSON | with the account |
| `{pNN}:account:<id>:apps` | set | names of its apps | with the account |
| `{pNN}:window:app:<id>` | list | when the requests of the last minute passed, µs | 60 s |
| `{pNN}:window:user:<id>:<hash>` | list | the same for one user of the app | 60 s |
| `{pNN}:spend:<account>:<day>` | hash | `settled`, `reserved`: nano-euro of a UTC day | 35 days |
| `{pNN}:reservations` | hash | id → `<account> <day> <nano-euro>` | each when settled |
| `{pNN}:leases` | zset | reservation ids by the end of their lease, ms | each when settled |
| `{pNN}:webhook:<account>` | string | the account's receiver, JSON; its secret sealed | when it is cleared |
| `{pNN}:events` | stream | events that wait for their outcome; group `webhooks` | each at its outcome; 100,000 |
| `{pNN}:deliveries:<account>` | stream | outcomes of deliveries, the last 1,000 | 30 days |
| `{pNN}:outcomes` | hash | outcome → how often | never: a dozen fields |
| `hook:<sha256>` | string | a deploy hook, JSON | when it is revoked |
| `{pNN}:hooks:<account>` | hash | hook id → its hash and record, JSON | each when revoked; 100 |
| `{pNN}:hooks-used:<account>` | hash | hook id → when it was last used, ms | each when revoked |
| `{pNN}:window:hook:<id>` | list | when a hook's triggers of the last minute came, µs | 60 s |
| `{pNN}:probes` | zset | app ids by when their next uptime probe is due, ms | with the app |
| `{pNN}:certificates` | zset | app ids by when their domain's certificate is looked at next, ms | with the app |
| `{pNN}:health:<app id>` | hash | `version`, `state`: what the probes saw, JSON | when it is not probed |
| `{pNN}:certificate:<app id>` | hash | `version`, `domain`, `fingerprint`, `expiresAt`, `told` | with its domain |
| `{pNN}:findings:<app id>` | hash | `version`, `open`: of the last scan, JSON, 5,000; `red`, `yellow` | with the app |
| `{pNN}:emitted:<event id>` | string | that an event was queued, for one that may be repeated | 1 hour |
| `{pNN}:awaited:<event id>` | string | outcome of an `app.unhealthy`, which decides on its `app.recovered` | 2 days |
| `{pNN}:site:<app id>` | hash | `live`: deploy id; `source`: id of its stored source | with the app |
| `{pNN}:deploy:<id>` | hash | a deploy's record | 90 days |
| `{pNN}:deploy-log:<id>` | string | a deploy's log, 256 KiB | 90 days |
| `{pNN}:deploys:<account>` | zset | deploy ids by when they were queued, ms; the last 1,000 | 90 days |
| `{pNN}:deploys-on:<account>:<day>` | string | deploys of a UTC day | 2 days |
| `{pNN}:builds` | stream | deploys that wait or are built; group `deploys` | each when it is over; 10,000 |
| `{registrations}:<day>` | string | registrations of a UTC day | 2 days |
| `session:<sha256>` | string | whose session of a page: an account's id, or `operator:<hash>` | 12 h |
| `logins:<hash>` | string | failed log-ins of one client address | 60 s |
| `{pNN}:usage:<account>:<hour>` | hash | `requests`, `refused`, `inputTokens`, `outputTokens` of an hour | 48 h |
| `{ops}:minute:<minute>` | hash | `requests`, `code:<CODE>`, `ttft:<ms>` and more: `gateway/counters.py` | 2 h |
| `{ops}:spend:<day>` | zset | accounts by what they spent, nano-euro, and `total` | 2 days |
| `{ops}:processes` | set | ids of the gateway processes | 15 s |
| `{ops}:process:<id>` | hash | `streams` open, `startedAt`, `seenAt` | 15 s |
| `builder` | string | id of the data folder that is built in | 15 s |
| `worker:<group>:<name>` | string | a worker's heartbeat, which holds its name | 15 s |

`{pNN}` is the account's partition and a Redis Cluster hash tag: CRC-16 of the account id modulo 16. One script may
so touch everything that belongs to an account, and everything of an app is under its account's tag.

Changed records are announced on the channel `changes` by the key that changed.
"""

from __future__ import annotations

import binascii
import hashlib

PARTITIONS = 16
CHANGES = "changes"
INFERENCE = "inference"
PROVIDER = "provider"
PROBE = "probe"
PERMITS = "permits"  # channel; `permits:<process>` is one process's
BUILDER = "builder"
PROCESSES = "{ops}:processes"
HEARTBEAT_SECONDS = 15  # that a worker's heartbeat lives


def app_key(name: str) -> str:
    return f"app:{name}"


def alias_key(app_id: str) -> str:
    return f"alias:{app_id}"


def api_key_key(digest: str) -> str:
    return f"key:{digest}"


def session_key(digest: str) -> str:
    return f"session:{digest}"


def logins_key(client: str) -> str:
    return f"logins:{client}"


def tag(account_id: str) -> str:
    return "{p%02d}" % (binascii.crc_hqx(account_id.encode(), 0) % PARTITIONS)


def account_key(account_id: str) -> str:
    return f"{tag(account_id)}:account:{account_id}"


def account_apps_key(account_id: str) -> str:
    return f"{tag(account_id)}:account:{account_id}:apps"


def app_window_key(tag: str, app_id: str) -> str:
    return f"{tag}:window:app:{app_id}"


def user_window_key(tag: str, app_id: str, user: str) -> str:
    """The user's id is the app's affair: Redis sees only its hash."""
    return f"{tag}:window:user:{app_id}:{hashlib.sha256(user.encode()).hexdigest()[:32]}"


def hook_window_key(tag: str, hook_id: str) -> str:
    return f"{tag}:window:hook:{hook_id}"


def reservation_keys(tag: str) -> list[str]:
    """Reservations, their leases."""
    return [f"{tag}:reservations", f"{tag}:leases"]


def spend_prefix(tag: str) -> str:
    """The scripts append account and day, in the same slot."""
    return f"{tag}:spend"


def spend_key(account_id: str, day: str) -> str:
    return f"{tag(account_id)}:spend:{account_id}:{day}"


def usage_key(account_id: str, hour: str) -> str:
    return f"{tag(account_id)}:usage:{account_id}:{hour}"


def minute_key(minute: str) -> str:
    return f"{{ops}}:minute:{minute}"


def spenders_key(day: str) -> str:
    return f"{{ops}}:spend:{day}"


def process_key(process_id: str) -> str:
    return f"{{ops}}:process:{process_id}"


def permits_key() -> str:
    return "{provider}:permits"


def waiting_key() -> str:
    return "{provider}:waiting"


def lease_keys() -> list[str]:
    """What `lease.lua` needs: state, permits, waiting, turns, past."""
    return ["{provider}:state", permits_key(), waiting_key(), "{provider}:turns", "{provider}:past"]


def worker_key(group: str, name: str) -> str:
    return f"worker:{group}:{name}"


def stream_key(tag: str, stream: str) -> str:
    """`events` or `builds` of a partition."""
    return f"{tag}:{stream}"


def outcomes_key(tag: str) -> str:
    return f"{tag}:outcomes"


def event_keys(tag: str, account_id: str) -> list[str]:
    """What a script needs that queues an event: the partition's events, the account's log, the outcomes."""
    return [stream_key(tag, "events"), deliveries_key(account_id), outcomes_key(tag)]


def webhook_key(account_id: str) -> str:
    return f"{tag(account_id)}:webhook:{account_id}"


def deliveries_key(account_id: str) -> str:
    return f"{tag(account_id)}:deliveries:{account_id}"


def hook_key(digest: str) -> str:
    return f"hook:{digest}"


def hooks_key(account_id: str) -> str:
    return f"{tag(account_id)}:hooks:{account_id}"


def hooks_used_key(account_id: str) -> str:
    return f"{tag(account_id)}:hooks-used:{account_id}"


def site_prefix(tag: str) -> str:
    return f"{tag}:site"


def site_key(account_id: str, app_id: str) -> str:
    return f"{site_prefix(tag(account_id))}:{app_id}"


def probes_key(tag: str) -> str:
    return f"{tag}:probes"


def certificates_key(tag: str) -> str:
    return f"{tag}:certificates"


def health_key(tag: str, app_id: str) -> str:
    return f"{tag}:health:{app_id}"


def certificate_key(tag: str, app_id: str) -> str:
    return f"{tag}:certificate:{app_id}"


def findings_key(tag: str, app_id: str) -> str:
    return f"{tag}:findings:{app_id}"


def monitored_keys(tag: str, app_id: str) -> list[str]:
    """All that the monitors know of an app."""
    return [health_key(tag, app_id), certificate_key(tag, app_id), findings_key(tag, app_id)]


def emitted_key(account_id: str, event_id: str) -> str:
    return f"{tag(account_id)}:emitted:{event_id}"


def awaited_prefix(tag: str) -> str:
    return f"{tag}:awaited"


def awaited_key(tag: str, event_id: str) -> str:
    return f"{awaited_prefix(tag)}:{event_id}"


def deploy_key(account_id: str, deploy_id: str) -> str:
    return tagged_deploy_key(tag(account_id), deploy_id)


def tagged_deploy_key(tag: str, deploy_id: str) -> str:
    return f"{tag}:deploy:{deploy_id}"


def deploy_log_key(account_id: str, deploy_id: str) -> str:
    return f"{tag(account_id)}:deploy-log:{deploy_id}"


def deploys_key(account_id: str) -> str:
    return f"{tag(account_id)}:deploys:{account_id}"


def deploys_on_prefix(account_id: str) -> str:
    """The day is appended, in the same slot."""
    return f"{tag(account_id)}:deploys-on:{account_id}"


def partition_tags() -> list[str]:
    return ["{p%02d}" % n for n in range(PARTITIONS)]
