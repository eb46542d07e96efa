"""Every key in Redis.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `app:<name>` | string | an app's record, JSON | when the app is deleted |
| `alias:<id>` | string | name of the app with this id, if the two differ | when the app is deleted |
| `domain:<name>` | string | id of the app with this custom domain, and time of its claim, s | with the app |
| `former-name:<name>` | string | id of the account whose live app had this name, until it was deleted | 30 days |
| `key:<sha256>` | string | `<account> <key id>`, to which a presented API key belongs | when the key is revoked |
| `{pNN}:account:<id>` | string | an account's record, JSON | with the account |
| `{pNN}:account:<id>:apps` | set | names of the account's apps | with the account |
| `{pNN}:app-lock:<account>` | string | held while one app of the account is created or deleted | 15 s |
| `{pNN}:app-changes:<account>` | string | number of creations and deletions of apps that were tried | 60 s |
| `{pNN}:deleted-apps:<account>` | list | ids of its apps that were deleted, whose windows the next ones get | 60 s |
| `{pNN}:accounts` | zset | ids of the partition's accounts, which sort by time | each with the account |
| `{pNN}:apps` | zset | ids of the partition's apps | each with the app |
| `{pNN}:keys:<account>` | hash | key id → the record of a valid API key, JSON | each when revoked; 26 |
| `{pNN}:keys-used:<account>` | hash | key id → time of its last use, ms | each when revoked |
| `{registrations}:<day>` | string | number of registrations on a UTC day | 2 days |
| `session:<sha256>` | string | what opened a page's session: `<account> <key id>`, or `operator:<hash>` | 12 h |
| `sessions:<sha256>` | list | hashes of the newest 20 sessions with one subject, by its hash | 12 h |
| `logins:<hash>` | string | number of failed log-ins from one client address | 60 s |
| `registered:<hash>` | string | number of registrations from one client address | 1 day |
| `inference` | string | the runtime switch and the approval, JSON | never: one record |
| `provider` | string | what is known about the provider's state, JSON | never: one record |
| `probe` | string | id of the process that is probing the provider | 20 s |
| `{pNN}:write-check` | string | nothing: writing it shows that Redis takes writes | 60 s |
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
| `{pNN}:usage:<account>:<hour>` | hash | `<app>/<model>/<count>` → number, of an hour; 1,000 and a few | 14 days |
| `{pNN}:usage:<account>:<day>` | hash | the same of a UTC day | 400 days |
| `{pNN}:requests:<account>` | list | the account's last 1,000 requests, JSON arrays | 30 days after the last one |
| `{pNN}:webhook:<account>` | string | the account's receiver, JSON; its secret is encrypted | when it is cleared |
| `{pNN}:previous-secret:<account>` | string | the secret before the last rotation, encrypted | 24 h |
| `{pNN}:events` | stream | events without an outcome yet; group `webhooks` | each at its outcome; 100,000 |
| `{pNN}:events:stored` | zset | account → bytes of its bodies and its log | never: one number per account |
| `{pNN}:deliveries:<account>` | stream | outcomes of the last 1,000 deliveries, each with the answer | 30 days |
| `{pNN}:deliveries:<account>:bodies` | hash | event id → its data, JSON; with the log at most 8 MiB | 30 days |
| `{pNN}:dead` | stream | entries that no worker could process, the last 100 | 30 days |
| `{pNN}:window:events:<account>` | list | times of its test events and redeliveries in the last minute, µs | 60 s |
| `{pNN}:redelivered:<account>` | string | mark that all failed events were sent again | 60 s |
| `{pNN}:outcomes` | hash | outcome → number of deliveries | never: a dozen fields |
| `{pNN}:emitted:<event id>` | string | mark of a queued event, so that queueing it again changes nothing | 1 hour |
| `{pNN}:awaited:<event id>` | string | outcome of an `app.unhealthy`, on which its `app.recovered` depends | 2 days |
| `hook:<sha256>` | string | a deploy hook, JSON | when it is revoked |
| `{pNN}:hooks:<account>` | hash | hook id → the hook's hash and record, JSON | each when revoked; 100 |
| `{pNN}:hooks-used:<account>` | hash | hook id → time of its last use, ms | each when revoked |
| `{pNN}:window:hook:<id>` | list | times of the hook's triggers in the last minute, µs | 60 s |
| `{pNN}:site:<app id>` | hash | `live`, `queued:<address>`: deploys; `source`: the stored source | with the app |
| `{pNN}:environment:<account>:<app id>` | string | the variables, JSON; values are encrypted | with the app; 64 KiB |
| `{pNN}:deploy:<id>` | hash | a deploy's record | 90 days |
| `{pNN}:deploy-log:<id>` | string | the log of a deploy in progress, at most 256 KiB | at the deploy's end, or 2 days |
| `{pNN}:deploys:<account>` | zset | ids of the last 1,000 deploys by the time they were queued, ms | 90 days |
| `{pNN}:deploys-on:<account>:<day>` | string | number of deploys on a UTC day | 2 days |
| `{pNN}:builds` | stream | deploys waiting or in progress; group `deploys` | each at the deploy's end; 10,000 |
| `{pNN}:builds:failed` | zset | `<account> <deploy>` of failed deploys by time, ms; the last 100 of a day | 1 day |
| `{pNN}:builds:ended` | hash | final state → number of deploys | never: three fields |
| `{builds}:waiting` | hash | with shared storage: deploys that wait for a builder, JSON | 150 s |
| `{builds}:running` | hash | deploys in progress and their builders, JSON | 150 s |
| `{builds}:turns` | zset | accounts by the number of their last turn to build | 150 s |
| `{pNN}:serving:<app id>` | hash | address → what the hosts serve there, with shared storage, JSON | with the app |
| `{pNN}:serving` | zset | app ids by the version of their last change in `serving` | with the app |
| `{pNN}:answers:<deploy id>` | hash | host → how far it is with the deploy, JSON | 1 hour |
| `{sites}:hosts` | zset | hosts that serve apps, by the time of their last heartbeat, ms | 30 s |
| `builder` | string | id of the data folder that holds the apps | 7 days after its last builder |
| `build-positions` | string | what each queued deploy waits for, by deploy id, JSON | 15 s |
| `{pNN}:probes` | zset | app ids by the time of their next uptime probe, ms | with the app |
| `{pNN}:certificates` | zset | app ids by the time of their next certificate check, ms | with the app |
| `{pNN}:certificates:ends` | zset | app ids by the end of their domain's certificate, ms | with its domain |
| `{pNN}:health:<app id>` | hash | `version`; `state`: what the probes found, JSON | when the app is no longer probed |
| `{pNN}:certificate:<app id>` | hash | `version`, `domain`, `issuer`, `expiresAt`, `fingerprint`, … | with its domain |
| `{pNN}:unhealthy` | zset | app ids by the time since when they are unhealthy, ms | each when the app answers |
| `{pNN}:findings:<app id>` | hash | `version`; `open`: the last scan, JSON, 5,000; `red`, `yellow` | with the app |
| `{pNN}:health-days:<app id>` | hash | `<day>:down`, ms, and `<day>:outages` of the days it was probed; 91 | 91 days |
| `{pNN}:crashes:<app id>` | stream | the last 20 crashes, each with its last lines of output | 30 days |
| `{ops}:minute:<minute>` | hash | `requests`, `code:<CODE>`, `ttft:<ms>`, …: `gateway/telemetry/counters.py` | 2 h |
| `{ops}:spend:<day>` | zset | accounts by the nano-euro they spent, and `total` | 2 days |
| `{ops}:processes` | set | ids of the gateway processes | 15 s |
| `{ops}:workers` | set | `<group>:<name>` of the workers that read no stream, also some that have ended | 1 h |
| `{ops}:process:<id>` | hash | open `streams`, `startedAt`, `seenAt` | 15 s |
| `{ops}:audit:<trail>` | stream | changes by operators, and reports of machines: the last 10,000 each | 400 days |
| `{ops}:clock` | hash | `day`, `hour`, `minute`: now, as the names of keys have them; for Grafana | 60 s |
| `worker:<group>:<name>` | string | a worker's heartbeat, which reserves its name | 15 s |

`{pNN}` is the account's partition and a Redis Cluster hash tag: CRC-16 of the account id modulo 16. An app's keys carry
its account's tag, so one script can access everything that belongs to an account.

When a record changes, the name of its key is published on the channel `changes`.
"""

from __future__ import annotations

import binascii
import hashlib
from functools import lru_cache

# The hash tags of the partitions. Of all tags with two digits, these have slots that spread evenly: the default slots
# of 3 to 16 primaries of Redis Cluster hold equally many partitions, but for one.
TAGS = tuple("{p%02d}" % n for n in (9, 13, 18, 19, 26, 32, 37, 38, 43, 44, 46, 49, 84, 86, 87, 96))
CACHE_SIZE = 4_096  # tags of accounts, and hashes of users
CHANGES, INFERENCE, PROVIDER, PROBE = "changes", "inference", "provider", "probe"
LEASE_NAMES = ("state", "permits", "waiting", "turns", "past", "leases", "waiters")
RATE_NAMES = ("rate", "spent")
PERMITS = "permits"  # channel; `permits:<process>` is one process's
BUILDER = "builder"
BUILD_POSITIONS = "build-positions"
SITES_HOSTS = "{sites}:hosts"
REGISTRATIONS = "{registrations}"  # the day is appended, in the same slot
REGISTRATIONS_MOVING = "{registrations}:moving"  # never exists; `register.lua` says what for
SESSIONS, REGISTERED = "sessions:", "registered:"  # the hash of a subject, or of an address, is appended
PROCESSES = "{ops}:processes"
WORKERS = "{ops}:workers"
CLOCK = "{ops}:clock"
HEARTBEAT_SECONDS = 15  # that a worker's heartbeat lives


def app_key(name: str) -> str:
    return f"app:{name}"


def alias_key(app_id: str) -> str:
    return f"alias:{app_id}"


def domain_key(domain: str) -> str:
    return f"domain:{domain}"


def former_name_key(name: str) -> str:
    return f"former-name:{name}"


def app_lock_key(account_id: str) -> str:
    return f"{tag(account_id)}:app-lock:{account_id}"


def app_changes_key(account_id: str) -> str:
    return f"{tag(account_id)}:app-changes:{account_id}"


def deleted_apps_key(account_id: str) -> str:
    return f"{tag(account_id)}:deleted-apps:{account_id}"


def api_key_key(digest: str) -> str:
    return f"key:{digest}"


def api_keys_key(account_id: str) -> str:
    return f"{tag(account_id)}:keys:{account_id}"


def api_keys_used_key(account_id: str) -> str:
    return f"{tag(account_id)}:keys-used:{account_id}"


def session_key(digest: str) -> str:
    return f"session:{digest}"


def logins_key(client: str) -> str:
    return f"logins:{client}"


@lru_cache(CACHE_SIZE)
def tag(account_id: str) -> str:
    return TAGS[binascii.crc_hqx(account_id.encode(), 0) % len(TAGS)]


def account_key(account_id: str) -> str:
    return f"{tag(account_id)}:account:{account_id}"


def account_apps_key(account_id: str) -> str:
    return f"{tag(account_id)}:account:{account_id}:apps"


def accounts_key(tag: str) -> str:
    return f"{tag}:accounts"


def apps_key(tag: str) -> str:
    return f"{tag}:apps"


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
    return [f"{tag(account_id)}:{kind}:{app_id}" for kind in ("key-set", "key-set-claim")]


def hook_window_key(tag: str, hook_id: str) -> str:
    return f"{tag}:window:hook:{hook_id}"


def events_window_key(account_id: str) -> str:
    return f"{tag(account_id)}:window:events:{account_id}"


def reservation_keys(tag: str) -> list[str]:
    """Reservations, their leases."""
    return [f"{tag}:reservations", f"{tag}:leases"]


def write_check_key(tag: str) -> str:
    return f"{tag}:write-check"


def settled_key(tag: str, reservation: str) -> str:
    return f"{tag}:settled:{reservation}"


def spend_prefix(tag: str) -> str:
    """The scripts append account and day, or `-by-user` and what follows there, in the same slot."""
    return f"{tag}:spend"


def account_spend_prefix(account_id: str) -> str:
    """The day is appended, in the same slot."""
    return f"{spend_prefix(tag(account_id))}:{account_id}"


def spend_key(account_id: str, day: str) -> str:
    return f"{account_spend_prefix(account_id)}:{day}"


def usage_key(account_id: str, period: str) -> str:
    """Of an hour, such as `2026-07-02T12`, or of a day."""
    return f"{tag(account_id)}:usage:{account_id}:{period}"


def requests_key(account_id: str) -> str:
    return f"{tag(account_id)}:requests:{account_id}"


def usage_keys(account_id: str, hour: str) -> list[str]:
    """The account's hour, the day that the hour is in, its requests."""
    day = hour.partition("T")[0]
    return [usage_key(account_id, hour), usage_key(account_id, day), requests_key(account_id)]


def app_spend_fields(app_id: str) -> list[str]:
    """Of the account's spend: what is settled and reserved for one of its apps."""
    return [f"settled:{app_id}", f"reserved:{app_id}"]


def user_spend_prefix(account_id: str, app_id: str, hashed: str) -> str:
    """The day is appended, in the same slot."""
    return f"{spend_prefix(tag(account_id))}-by-user:{account_id}:{app_id}:{hashed}"


def minute_key(minute: str) -> str:
    return f"{{ops}}:minute:{minute}"


def spenders_key(day: str) -> str:
    return f"{{ops}}:spend:{day}"


def audit_key(trail: str) -> str:
    return f"{{ops}}:audit:{trail}"


def process_key(process_id: str) -> str:
    return f"{{ops}}:process:{process_id}"


def permits_channel(process: str) -> str:
    return f"{PERMITS}:{process}"


def permits_key() -> str:
    return "{provider}:permits"


def waiting_key() -> str:
    return "{provider}:waiting"


def lease_keys(*, rated: bool = False) -> list[str]:
    """What `lease.lua` needs, in its order; with a quota of the provider's two more."""
    return [f"{{provider}}:{name}" for name in (*LEASE_NAMES, *(RATE_NAMES if rated else ()))]


def worker_key(group: str, name: str) -> str:
    return f"worker:{group}:{name}"


def stream_key(tag: str, stream: str) -> str:
    """`events` or `builds` of a partition."""
    return f"{tag}:{stream}"


def failed_deploys_key(tag: str) -> str:
    return f"{stream_key(tag, 'builds')}:failed"


def ended_deploys_key(tag: str) -> str:
    """`trigger.lua` appends it to the key of the builds."""
    return f"{stream_key(tag, 'builds')}:ended"


def outcomes_key(tag: str) -> str:
    return f"{tag}:outcomes"


def event_keys(tag: str, account_id: str) -> list[str]:
    """What a script needs that queues an event: the partition's events, the account's log, the outcomes, and two more.

    The scripts make the names of the last two themselves; they stand here because Redis lets a script run during the
    move of a slot only where it finds all that the call declares.
    """
    return [
        stream_key(tag, "events"),
        deliveries_key(account_id),
        outcomes_key(tag),
        bodies_key(account_id),
        stored_key(tag),
    ]


def webhook_key(account_id: str) -> str:
    return f"{tag(account_id)}:webhook:{account_id}"


def previous_secret_key(account_id: str) -> str:
    return f"{tag(account_id)}:previous-secret:{account_id}"


def redelivered_key(account_id: str) -> str:
    return f"{tag(account_id)}:redelivered:{account_id}"


def deliveries_key(account_id: str) -> str:
    return f"{tag(account_id)}:deliveries:{account_id}"


def bodies_key(account_id: str) -> str:
    """The data of the account's events. The scripts that queue and log events append it to the log's key."""
    return f"{deliveries_key(account_id)}:bodies"


def stored_key(tag: str) -> str:
    """What the accounts' bodies and logs take. The scripts append it to the key of the events."""
    return f"{stream_key(tag, 'events')}:stored"


def dead_letters_key(tag: str) -> str:
    return f"{tag}:dead"


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


def environment_key(account_id: str, app_id: str) -> str:
    """With the account: an app of the same id may later belong to another one."""
    return f"{tag(account_id)}:environment:{account_id}:{app_id}"


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


def health_days_key(tag: str, app_id: str) -> str:
    return f"{tag}:health-days:{app_id}"


def crashes_key(tag: str, app_id: str) -> str:
    return f"{tag}:crashes:{app_id}"


def certificate_ends_key(tag: str) -> str:
    return f"{tag}:certificates:ends"


def unhealthy_key(tag: str) -> str:
    return f"{tag}:unhealthy"


def monitored_keys(tag: str, app_id: str) -> list[str]:
    """All that the monitors know of an app."""
    kinds = (health_key, health_days_key, certificate_key, findings_key, crashes_key)
    return [kind(tag, app_id) for kind in kinds]


def emitted_key(account_id: str, event_id: str) -> str:
    return f"{tag(account_id)}:emitted:{event_id}"


def awaited_prefix(tag: str) -> str:
    return f"{tag}:awaited"


def awaited_key(tag: str, event_id: str) -> str:
    return f"{awaited_prefix(tag)}:{event_id}"


def deploy_key(account_id: str, deploy_id: str) -> str:
    return tagged_deploy_key(tag(account_id), deploy_id)


def tagged_deploy_key(tag: str, deploy_id: str) -> str:
    return f"{deploy_prefix(tag)}:{deploy_id}"


def deploy_prefix(tag: str) -> str:
    return f"{tag}:deploy"


def serving_key(account_id: str, app_id: str) -> str:
    return f"{tag(account_id)}:serving:{app_id}"


def tagged_serving_key(tag: str, app_id: str) -> str:
    return f"{tag}:serving:{app_id}"


def served_apps_key(tag: str) -> str:
    return f"{tag}:serving"


def answers_key(account_id: str, deploy_id: str) -> str:
    return f"{tag(account_id)}:answers:{deploy_id}"


def turn_keys() -> list[str]:
    """Waiting, running, turns."""
    return ["{builds}:waiting", "{builds}:running", "{builds}:turns"]


def deploy_log_key(account_id: str, deploy_id: str) -> str:
    return f"{tag(account_id)}:deploy-log:{deploy_id}"


def deploys_key(account_id: str) -> str:
    return f"{tag(account_id)}:deploys:{account_id}"


def deploys_on_key(account_id: str, day: str) -> str:
    return f"{deploys_on_prefix(account_id)}:{day}"


def deploys_on_prefix(account_id: str) -> str:
    """The day is appended, in the same slot."""
    return f"{tag(account_id)}:deploys-on:{account_id}"
