"""Every key in Redis. docs/keyspace.md is made from these tables.

`{pNN}` is the account's partition: CRC-16 of the account id modulo 16. When a record changes, the name of its key is
published on the channel `changes`.

## Accounts and apps

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
| `{pNN}:app-changes:<account>` | string | number of attempts to create, change or delete an app | 60 s |
| `{pNN}:token-checks:<account>` | string | number of tokens that the account holder checked | 60 s |
| `{pNN}:deleted-apps:<account>` | list | ids of its deleted apps, whose windows its next new apps inherit | 60 s |
| `{pNN}:domain-lookups:<app id>` | string | number of times that its custom domain was to be verified | 60 s |
| `{pNN}:accounts` | zset | ids of the partition's accounts, which sort by time | each with the account |
| `{pNN}:apps` | zset | ids of the partition's apps | each with the app |
| `{pNN}:deletions` | zset | accounts that are being deleted, by the time of that, ms | each with the account |
| `{pNN}:leaving:<account>` | set | ids and names of its apps, while a worker deletes it | with the account |
| `{pNN}:former-names:<account>` | set | names that `former-name:` withholds for it | 30 days |
| `{pNN}:spend-of-deleted:<account>` | hash | UTC day → nano-euro that a deleted account spent | 400 days |
| `{pNN}:suspended` | hash | suspended account, or `app:` and app id → time, ms; `version` | each when resumed |
| `{pNN}:keys:<account>` | hash | key id → the record of a valid API key, JSON | each when revoked; 26 |
| `{pNN}:audit:<account>` | stream | other changes by its keys and sessions: the last 5,000 | 90 days |
| `{pNN}:audit:<account>:rights` | stream | changes of keys, members, webhook and deletion: 5,000 | 90 days |
| `{pNN}:audit:<account>:operators` | stream | changes by operators: the last 5,000 | 90 days |
| `{pNN}:audit:<account>:…:counts` | hash | entry of one of these streams → number of equal changes | 90 days |
| `{pNN}:audit:<account>:…:of:<hash>` | list | entries of one actor in one of these streams; 1,000 | 90 days |
| `{pNN}:audit:<account>:…:last:<hash>` | string | entry of a change, with which equal ones are counted | 60 s |
| `{pNN}:keys-used:<account>` | hash | key id → time of its last use, ms | each when revoked |
| `{pNN}:members:<account>` | string | its members: e-mail address → role and time, JSON; 100 | with the account |
| `{pNN}:invitations:<account>` | string | hash of an address → its open invitation, JSON; 50 | 14 days after the last |
| `invited-by:<sha256>` | zset | accounts that invite an address (its hash), by the end, ms; 1,000 | 14 days |
| `memberships:<sha256>` | string | ids of the accounts of an e-mail address, by its hash; 50 | with the last of them |
| `{registrations}:<day>` | string | number of registrations on a UTC day | 2 days |
| `{registrations}:<day>:anonymous` | string | number of those without a sign-in | 2 days |
| `session:<sha256>` | string | subject of a page's session: `<account> <key id>`, `operator:<hash>`, a person | 12 h |
| `sessions:<sha256>` | list | hashes of the newest 20 sessions with one subject, by its hash | 12 h |
| `logins:<hash>` | string | number of failed log-ins from one network: an IPv4 address, or a /64 of IPv6 | 60 s |
| `sign-in:<sha256>` | string | mark of a sign-in that has come back from the provider | 10 min |
| `first-sign-in:<sha256>` | string | mark of an e-mail address that is getting an account | 10 s |
| `registered:<hash>` | string | number of registrations from one network; `…:anonymous`: without a sign-in | 1 day |

## Inference

| key | type | holds | expires |
| --- | --- | --- | --- |
| `inference` | string | the runtime switch, the approval, and the disabled providers, JSON | never: one record |
| `provider` | string | the provider's health, JSON; of a named provider `provider:<name>` | never: one record |
| `provider-answers` | zset | accounts with its two latest answers, by their time, ms; or `…:<name>` | 30 s |
| `provider-trial` | string | id of the process whose request tries the unhealthy provider; or `…:<name>` | 30 s |
| `probe` | string | id of the process that is probing the provider; or `probe:<name>` | 20 s |
| `provider-refusal` | string | exists while the provider refuses requests for lack of quota; or `…:<name>` | 2 s |
| `{provider}:failed` | string | accounts that met its last failures in a row, at most two, JSON | 10 min |
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

## Usage and counters

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{pNN}:usage:<account>:<hour>` | hash | `<app>/<model>/<count>` → number, for an hour; about 1,000 fields | 14 days |
| `{pNN}:usage:<account>:<day>` | hash | the same for a UTC day | 400 days |
| `{pNN}:request-log:<account>` | zset | its last 1,000 requests, JSON arrays by arrival, ms | 30 days after the last |
| `{ops}:minute:<minute>` | hash | `requests`, `code:<CODE>`, `ttft:<ms>`, …: `gateway/telemetry/counters.py` | 2 h |
| `{ops}:hour:<hour>` | hash | `requests`, `code:<CODE>` and `settled` of all accounts | 15 days |
| `{ops}:spend:<day>` | zset | accounts by their spend in nano-euro, and `total` | 2 days |
| `{ops}:processes` | set | ids of the gateway processes | 15 s |
| `{ops}:process:<id>` | hash | open `streams`, `startedAt`, `seenAt` | 15 s |
| `{ops}:clock` | hash | the current `day`, `hour` and `minute`, in the format of key names; for Grafana | 60 s |

## Events

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

## Notices by e-mail

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{pNN}:notices:<account>` | hash | hash of an address → the address and its kinds, JSON | each when it ends all |
| `{pNN}:mails` | stream | notices to send, each to the hash of an address; group `notices` | each at its end; 10,000 |
| `{pNN}:mails:outcomes` | hash | outcome → number of notices | never: four fields |
| `{pNN}:noticed:<account>:<subject>` | string | level of the last notice about an event, or a day's cap | 2 days |
| `notices-on:<hash>:<day>` | string | number of notices that an address got on a UTC day | 2 days |
| `invitations-on:<hash>:<day>` | string | number of invitations that an address got by e-mail on a UTC day | 2 days |
| `{pNN}:invitation-mails:<account>` | string | number of invitations that an account has sent by e-mail | 1 day |
| `uninvited:<sha256>` | string | mark of an address, by its hash, that gets no invitations by e-mail | 400 days |
| `{pNN}:notices-on:<account>:<hash>:<day>` | string | number of those of one account | 2 days |

## Deploys

| key | type | holds | expires |
| --- | --- | --- | --- |
| `hook:<sha256>` | string | a deploy hook, JSON | when it is revoked |
| `{pNN}:hooks:<account>` | hash | hook id → the hook's hash and record, JSON | each when revoked; 100 |
| `{pNN}:hooks-used:<account>` | hash | hook id → time of its last use, ms | each when revoked |
| `{pNN}:window:hook:<id>` | rate window | the hook's triggers | 60 s |
| `{pNN}:site:<app id>` | hash | `live`, `queued:<address>`, `preview:<address>`: deploys; `source` | with the app |
| `{pNN}:certified-names:<account>` | zset | names that may have certificates, by the first request, s | 90 days |
| `{pNN}:environment:<account>:<app id>` | string | the variables, JSON; values are encrypted | with the app; 64 KiB |
| `{pNN}:deploy:<id>` | hash | a deploy's record | 90 days |
| `{pNN}:deploy-log:<id>` | string | the log of a deploy in progress, at most 256 KiB | at the deploy's end, or 2 days |
| `{pNN}:deploys:<account>` | zset | ids of the last 1,000 deploys by the time they were queued, ms | 90 days |
| `{pNN}:deploys-on:<account>:<day>` | string | number of deploys on a UTC day | 2 days |
| `{pNN}:builds` | stream | deploys waiting or in progress; group `deploys` | each at the deploy's end; 10,000 |
| `{pNN}:builds:failed` | zset | `<account> <deploy>` of failed deploys by time, ms; the last 100 of a day | 1 day |
| `{pNN}:builds:ended` | hash | final state → number of deploys | never: three fields |
| `{builds}:waiting` | hash | deploys that wait for a builder, JSON | 150 s |
| `{builds}:running` | hash | deploys in progress and their builders, JSON | 150 s |
| `{builds}:order` | zset | accounts by the number of their last build | 150 s |
| `{pNN}:serving:<app id>` | hash | address → the release to serve, JSON | with the app |
| `{pNN}:serving` | zset | app ids by the version of their last change in `serving` | with the app |
| `{pNN}:answer:<deploy id>` | string | the progress of what serves the apps with the deploy, JSON | 1 hour |
| `{sites}:folder` | string | id of the data folder that holds the apps, without shared storage | 7 days |
| `{sites}:reports` | hash | host → its free disk and its missing releases, JSON | 90 s |
| `{sites}:engine` | string | what serves the apps, a host or a cluster's worker, JSON | 15 s |
| `{sites}:pods` | string | its report of the nodes and pods of apps, and of what waits for room, JSON | 60 s |
| `build-positions` | string | the position and reason of each queued deploy, by deploy id, JSON | 15 s |

## Data

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{pNN}:data:<account>:<app id>` | string | the bytes, state and problem that the app's host reports, JSON | 7 days |
| `{pNN}:data-snapshots:<account>:<app id>` | hash | snapshot id → the snapshot, JSON | with the app; 21 |
| `{pNN}:data-snapshots-made:<app id>` | string | number of snapshots that its account has asked for | 1 hour |
| `{pNN}:data-deleted:<account>` | hash | record id → a deleted app and its snapshots, JSON | 8 days |
| `{pNN}:data-deleted` | zset | `<account> <record id>` by the time of the deletion, ms | each after 7 days |
| `{pNN}:data-commands` | hash | `<account> <id>` → a command to the host of an app's data, JSON | 7 days; 1,000 |
| `{pNN}:data-answer:<command id>` | string | the host's answer to a command, JSON | 1 hour |

## Monitors

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{pNN}:probes` | zset | app ids by the time of their next uptime probe, ms | with the app |
| `{pNN}:certificates` | zset | app ids by the time of their next certificate check, ms | with the app |
| `{pNN}:certificates:ends` | zset | app ids by the end of their domain's certificate, ms | with its domain |
| `{pNN}:domain-checks` | zset | app ids by the time of their domain's next check, ms | with the app |
| `{pNN}:health:<app id>` | hash | `version`; `state`: the health, JSON | when the app is no longer probed |
| `{pNN}:certificate:<app id>` | hash | `version`, `domain`, `issuer`, `expiresAt`, `fingerprint`, … | with its domain |
| `{pNN}:domain-check:<app id>` | hash | `version`, `domain`; `missingSince`: without its record, ms | with its domain |
| `{pNN}:unhealthy` | zset | app ids by the time at which they became unhealthy, ms | each when the app answers |
| `{pNN}:findings:<app id>` | hash | `version`; `open`: the last scan, JSON, 5,000; `red`, `yellow` | with the app |
| `{pNN}:health-days:<app id>` | hash | `<day>:down`, ms, and `<day>:outages` of days with probes; 91 | 91 days |
| `{pNN}:crashes:<app id>` | stream | the last 20 crashes, each with its last lines of output | 30 days |

## Operation

| key | type | holds | expires |
| --- | --- | --- | --- |
| `layout` | string | the number of the layout of these keys | never: one number |
| `layout-lock` | string | id of the process that upgrades the data to another layout | 30 s |
| `{ops}:workers` | set | `<group>:<name>` of the workers that read no stream, including some that have ended | 1 h |
| `{ops}:audit:<trail>` | stream | changes by operators, or reports of machines: the last 10,000 of each | 400 days |
| `worker:<group>:<name>` | string | a worker's heartbeat, which reserves its name | 15 s |
| `{pNN}:write-check` | string | write probe: its value is not used | 60 s |
"""

import binascii
import hashlib
from collections.abc import Callable
from functools import lru_cache

from gateway.settings import DEFAULT_PROVIDER

# The hash tags of the partitions. Of all tags with two digits, the slots of these spread evenly: with the default slots
# of 3 to 16 primaries of Redis Cluster, the numbers of partitions per primary differ by at most one.
PARTITION_TAGS = tuple("{p%02d}" % n for n in (9, 13, 18, 19, 26, 32, 37, 38, 43, 44, 46, 49, 84, 86, 87, 96))
CACHE_SIZE = 4_096  # tags of accounts, and hashes of users


@lru_cache(CACHE_SIZE)
def partition_tag(account_id: str) -> str:
    return PARTITION_TAGS[binascii.crc_hqx(account_id.encode(), 0) % len(PARTITION_TAGS)]


def write_check_key(tag: str) -> str:
    return f"{tag}:write-check"


def stream_key(tag: str, stream: str) -> str:
    """Returns the key of the stream `events`, `builds` or `mails` of a partition."""
    return f"{tag}:{stream}"


# What `capsule backup` copies, by the first word of a key. It copies no stream.
BACKED_UP = frozenset(
    (
        *(
            "account",
            "accounts",
            "alias",
            "app",
            "apps",
            "deletions",
            "domain",
            "former-name",
            "former-names",
            "invitations",
            "invited-by",
            "key",
            "keys",
            "keys-used",
            "leaving",
            "members",
            "memberships",
            "suspended",
        ),
        *("inference", "request-log", "spend", "spend-by-user", "spend-of-deleted", "usage"),
        *("notices", "outcomes", "previous-secret", "uninvited", "webhook"),
        *("builds", "certified-names", "deploy", "deploys", "deploys-on", "environment", "hook", "hooks"),
        *("hooks-used", "serving", "site"),
        *("data", "data-deleted", "data-snapshots"),
        *(
            "certificate",
            "certificates",
            "domain-check",
            "domain-checks",
            "findings",
            "health",
            "health-days",
            "probes",
        ),
        "unhealthy",
    )
)
# What it leaves out: what is of this moment, or counts for seconds.
LEFT_OUT = frozenset(
    (
        *(
            "app-changes",
            "audit",
            "app-lock",
            "deleted-apps",
            "domain-lookups",
            "first-sign-in",
            "logins",
            "registered",
            "session",
            "sessions",
            "sign-in",
        ),
        *("token-checks", "{registrations}"),
        *("key-set", "key-set-claim", "leases", "probe", "provider", "provider-answers", "provider-refusal"),
        *("provider-trial", "reservations", "settled"),
        *("window", "{provider}"),
        *("awaited", "dead", "deliveries", "emitted", "events", "mails", "noticed", "notices-on", "redelivered"),
        *("invitation-mails", "invitations-on"),
        *("answer", "build-positions", "deploy-log", "{builds}", "{sites}"),
        *("data-answer", "data-commands", "data-snapshots-made"),
        "crashes",
        *("layout", "layout-lock", "worker", "write-check", "{ops}"),
    )
)


def kind_of(key: str) -> str:
    """Returns the word that a key begins with after the tag of its partition, or another tag."""
    if key.startswith("{provider"):  # of one of several providers, `{provider:<name>}`
        return "{provider}"
    tag, _, rest = key.partition(":")
    return rest.partition(":")[0] if tag in PARTITION_TAGS else tag


def tag_of(key: str) -> str:
    """Returns the tag of the key's partition, or ''."""
    return tag if (tag := key.partition(":")[0]) in PARTITION_TAGS else ""


# -- functions that build the keys of one kind ---------------------------------------------------------------


def keys_of_all(kind: str) -> Callable[[str], str]:
    """Returns the function from an id to a key outside the partitions."""
    return lambda of: f"{kind}:{of}"


def keys_of_partition(kind: str) -> Callable[[str], str]:
    """Returns the function from a partition's tag to its key."""
    return lambda tag: f"{tag}:{kind}"


def keys_in_partition(kind: str) -> Callable[[str, str], str]:
    """Returns the function from a partition's tag and an id, such as that of an app, to a key of the partition."""
    return lambda tag, of: f"{tag}:{kind}:{of}"


def keys_of_account(kind: str) -> Callable[[str], str]:
    """Returns the function from an account's id to its key."""
    return lambda account_id: f"{partition_tag(account_id)}:{kind}:{account_id}"


def keys_in_account(kind: str) -> Callable[[str, str], str]:
    """Returns the function from an account's id and another id to a key in the account's partition."""
    return lambda account_id, of: f"{partition_tag(account_id)}:{kind}:{of}"


# -- accounts and apps -----------------------------------------------------------------------------------------

REGISTRATIONS_KEY = "{registrations}"  # the day is appended, in the same slot
REGISTRATIONS_MOVING_KEY = "{registrations}:moving"  # never exists; `count_registration.lua` explains why
APP = "app"
REGISTERED_PREFIX = "registered:"

app_key = keys_of_all(APP)
alias_key = keys_of_all("alias")
domain_key = keys_of_all("domain")
former_name_key = keys_of_all("former-name")
api_key_key = keys_of_all("key")
session_key = keys_of_all("session")
sessions_key = keys_of_all("sessions")
logins_key = keys_of_all("logins")
sign_in_key = keys_of_all("sign-in")
first_sign_in_key = keys_of_all("first-sign-in")
memberships_key = keys_of_all("memberships")
invited_by_key = keys_of_all("invited-by")

account_key = keys_of_account("account")
app_lock_key = keys_of_account("app-lock")
app_changes_key = keys_of_account("app-changes")
token_checks_key = keys_of_account("token-checks")
deleted_apps_key = keys_of_account("deleted-apps")
api_keys_key = keys_of_account("keys")
former_names_key = keys_of_account("former-names")
leaving_key = keys_of_account("leaving")
members_key = keys_of_account("members")
invitations_key = keys_of_account("invitations")
spend_of_deleted_key = keys_of_account("spend-of-deleted")
account_audit_key = keys_of_account("audit")
api_keys_used_key = keys_of_account("keys-used")

domain_lookups_key = keys_in_account("domain-lookups")

accounts_key = keys_of_partition("accounts")
apps_key = keys_of_partition("apps")
suspended_key = keys_of_partition("suspended")
deletions_key = keys_of_partition("deletions")


def account_apps_key(account_id: str) -> str:
    return f"{account_key(account_id)}:apps"


def trail_stream_key(account_id: str, part: str) -> str:
    """Returns the key of one part of the account's trail; `part` is "" for changes that belong to no other part."""
    return f"{account_audit_key(account_id)}:{part}" if part else account_audit_key(account_id)


def trail_counts_key(account_id: str, part: str) -> str:
    return f"{trail_stream_key(account_id, part)}:counts"


def trail_actor_key(account_id: str, part: str, hashed: str) -> str:
    return f"{trail_stream_key(account_id, part)}:of:{hashed}"


def trail_last_key(account_id: str, part: str, hashed: str) -> str:
    return f"{trail_stream_key(account_id, part)}:last:{hashed}"


# -- data ------------------------------------------------------------------------------------------------------


def data_status_key(account_id: str, app_id: str) -> str:
    """Includes the account, because an app of the same id may later belong to another one."""
    return f"{partition_tag(account_id)}:data:{account_id}:{app_id}"


def data_snapshots_key(account_id: str, app_id: str) -> str:
    """Includes the account, for the same reason."""
    return f"{partition_tag(account_id)}:data-snapshots:{account_id}:{app_id}"


data_snapshots_made_key = keys_in_account("data-snapshots-made")
data_answer_key = keys_in_account("data-answer")
deleted_data_key = keys_of_account("data-deleted")
data_deletions_key = keys_of_partition("data-deleted")
data_commands_key = keys_of_partition("data-commands")


# -- deploys ---------------------------------------------------------------------------------------------------

BUILD_POSITIONS_KEY = "build-positions"
APPS_FOLDER_KEY = "{sites}:folder"
ENGINE_KEY = "{sites}:engine"
PODS_KEY = "{sites}:pods"
REPORTS_KEY = "{sites}:reports"
FORMER_HOSTS_KEYS = ("{sites}:hosts", "{sites}:leases")  # of layout 1, as the next one
former_claims_key = keys_of_partition("claims")

hook_key = keys_of_all("hook")

hooks_key = keys_of_account("hooks")
hooks_used_key = keys_of_account("hooks-used")
deploys_key = keys_of_account("deploys")
certified_names_key = keys_of_account("certified-names")
deploys_on_prefix = keys_of_account("deploys-on")  # a script appends the day, in the same slot

site_key = keys_in_account("site")
deploy_key = keys_in_account("deploy")
deploy_log_key = keys_in_account("deploy-log")
serving_key = keys_in_account("serving")
answer_key = keys_in_account("answer")

site_prefix = keys_of_partition("site")
deploy_prefix = keys_of_partition("deploy")
served_apps_key = keys_of_partition("serving")
failed_deploys_key = keys_of_partition("builds:failed")
ended_deploys_key = keys_of_partition("builds:ended")  # `queue_deploy.lua` appends it to the key of the builds

tagged_deploy_key = keys_in_partition("deploy")
tagged_serving_key = keys_in_partition("serving")
hook_window_key = keys_in_partition("window:hook")


def environment_key(account_id: str, app_id: str) -> str:
    """Includes the account, because an app of the same id may later belong to another one."""
    return f"{partition_tag(account_id)}:environment:{account_id}:{app_id}"


def deploys_on_key(account_id: str, day: str) -> str:
    return f"{deploys_on_prefix(account_id)}:{day}"


def build_queue_keys() -> list[str]:
    """Returns the keys of the deploys that wait, those that run, and the order of accounts."""
    return ["{builds}:waiting", "{builds}:running", "{builds}:order"]


# -- events ----------------------------------------------------------------------------------------------------

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

notices_key = keys_of_account("notices")
mail_outcomes_key = keys_of_partition("mails:outcomes")
invitation_mails_key = keys_of_account("invitation-mails")
uninvited_key = keys_of_all("uninvited")


def noticed_key(account_id: str, subject: str) -> str:
    return f"{partition_tag(account_id)}:noticed:{account_id}:{subject}"


def notices_on_key(hashed: str, day: str) -> str:
    return f"notices-on:{hashed}:{day}"


def invitations_on_key(hashed: str, day: str) -> str:
    return f"invitations-on:{hashed}:{day}"


def account_notices_on_key(account_id: str, hashed: str, day: str) -> str:
    return f"{partition_tag(account_id)}:notices-on:{account_id}:{hashed}:{day}"


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


# -- inference -------------------------------------------------------------------------------------------------

INFERENCE_KEY = "inference"
LEASE_NAMES = ("state", "permits", "waiting", "order", "past", "leases", "waiters")
QUOTA_NAMES = ("quota", "spent")


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


def _of_provider(kind: str, provider: str) -> str:
    """The only provider of an installation without a providers file has the names from before there were several."""
    return kind if provider == DEFAULT_PROVIDER else f"{kind}:{provider}"


def provider_key(provider: str = DEFAULT_PROVIDER) -> str:
    return _of_provider("provider", provider)


def probe_key(provider: str = DEFAULT_PROVIDER) -> str:
    return _of_provider("probe", provider)


def failed_accounts_key(provider: str = DEFAULT_PROVIDER) -> str:
    """Is in the slot of the provider's health, because both are written in one step."""
    return f"{{{provider_key(provider)}}}:failed"


def trial_key(provider: str = DEFAULT_PROVIDER) -> str:
    return _of_provider("provider-trial", provider)


def answers_of_provider_key(provider: str = DEFAULT_PROVIDER) -> str:
    return _of_provider("provider-answers", provider)


def refusal_key(provider: str = DEFAULT_PROVIDER) -> str:
    return _of_provider("provider-refusal", provider)


def permits_key(provider: str = DEFAULT_PROVIDER) -> str:
    return f"{{{provider_key(provider)}}}:permits"


def waiting_key(provider: str = DEFAULT_PROVIDER) -> str:
    return f"{{{provider_key(provider)}}}:waiting"


def lease_keys(provider: str = DEFAULT_PROVIDER, *, rated: bool = False) -> list[str]:
    """Returns the keys of `lease.lua`, in its order. With a quota of the provider there are two more."""
    names = (*LEASE_NAMES, *(QUOTA_NAMES if rated else ()))
    return [f"{{{provider_key(provider)}}}:{name}" for name in names]


def permits_channel(provider: str = DEFAULT_PROVIDER, process: str = "") -> str:
    """Returns the channel for all processes, or that of one process."""
    channel = _of_provider("permits", provider)
    return f"{channel}:{process}" if process else channel


# -- monitors --------------------------------------------------------------------------------------------------

probes_key = keys_of_partition("probes")
certificates_key = keys_of_partition("certificates")
certificate_ends_key = keys_of_partition("certificates:ends")
domain_checks_key = keys_of_partition("domain-checks")
unhealthy_key = keys_of_partition("unhealthy")

health_key = keys_in_partition("health")
certificate_key = keys_in_partition("certificate")
domain_check_key = keys_in_partition("domain-check")
findings_key = keys_in_partition("findings")
health_days_key = keys_in_partition("health-days")
crashes_key = keys_in_partition("crashes")


def monitored_keys(tag: str, app_id: str) -> list[str]:
    """Returns the keys of all records that the monitors have of an app."""
    kinds = (health_key, health_days_key, certificate_key, domain_check_key, findings_key, crashes_key)
    return [kind(tag, app_id) for kind in kinds]


# -- operation -------------------------------------------------------------------------------------------------

LAYOUT_KEY = "layout"
LAYOUT_LOCK_KEY = "layout-lock"
WORKERS_KEY = "{ops}:workers"
HEARTBEAT_SECONDS = 15  # lifetime of a worker's heartbeat


def audit_key(trail: str) -> str:
    return f"{{ops}}:audit:{trail}"


def worker_key(group: str, name: str) -> str:
    return f"worker:{group}:{name}"


# -- usage and counters ----------------------------------------------------------------------------------------

PROCESSES_KEY = "{ops}:processes"
CLOCK_KEY = "{ops}:clock"


def usage_key(account_id: str, period: str) -> str:
    """Returns the key of an hour, such as `2026-07-02T12`, or of a day."""
    return f"{partition_tag(account_id)}:usage:{account_id}:{period}"


def requests_key(account_id: str) -> str:
    return f"{partition_tag(account_id)}:request-log:{account_id}"


def usage_keys(account_id: str, hour: str) -> list[str]:
    """Returns the keys of the account's hour, of the day of that hour, and of the account's requests."""
    day = hour.partition("T")[0]
    return [usage_key(account_id, hour), usage_key(account_id, day), requests_key(account_id)]


def minute_key(minute: str) -> str:
    return f"{{ops}}:minute:{minute}"


def hour_key(hour: str) -> str:
    return f"{{ops}}:hour:{hour}"


def spenders_key(day: str) -> str:
    return f"{{ops}}:spend:{day}"


def process_key(process_id: str) -> str:
    return f"{{ops}}:process:{process_id}"
