"""Every key in Redis, declared once: what builds it, what it holds, when it ends, and whether a backup has it.

The tables of docs/keyspace.md, the list of what a backup copies, and the tests' search for keys that never end are made
from the declarations.

`{pNN}` is the account's partition: CRC-16 of the account id modulo 16. When a record changes, the name of its key is
published on the channel `changes`.
"""

import binascii
import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeVar

from gateway.settings import DEFAULT_PROVIDER

# The hash tags of the partitions. Of all tags with two digits, the slots of these spread evenly: with the default slots
# of 3 to 16 primaries of Redis Cluster, the numbers of partitions per primary differ by at most one.
PARTITION_TAGS = tuple("{p%02d}" % n for n in (9, 13, 18, 19, 26, 32, 37, 38, 43, 44, 46, 49, 84, 86, 87, 96))
CACHE_SIZE = 4_096  # tags of accounts, and hashes of users


@lru_cache(CACHE_SIZE)
def partition_tag(account_id: str) -> str:
    return PARTITION_TAGS[binascii.crc_hqx(account_id.encode(), 0) % len(PARTITION_TAGS)]


def kind_of(key: str) -> str:
    """Returns the word that a key begins with after the tag of its partition, or another tag."""
    if key.startswith("{provider"):  # of one of several providers, `{provider:<name>}`
        return "{provider}"
    tag, _, rest = key.partition(":")
    return rest.partition(":")[0] if tag in PARTITION_TAGS else tag


def tag_of(key: str) -> str:
    """Returns the tag of the key's partition, or ''."""
    return tag if (tag := key.partition(":")[0]) in PARTITION_TAGS else ""


# -- declarations ----------------------------------------------------------------------------------------------


class Key(NamedTuple):
    name: str  # `{pNN}` stands for the tag of a partition; angle brackets enclose a variable, square ones an option
    holds: str  # its type and its content; a number is the most entries
    ends: str  # if this begins with a number, Redis removes the key; otherwise the service removes it, or what is in it
    saved: bool  # `capsule backup` copies it, unless it is a stream

    @property
    def kind(self) -> str:
        return kind_of(self.name.replace("{pNN}", PARTITION_TAGS[0]).replace("[", ""))


SAVED = True
TABLES: dict[str, list[Key]] = {}  # by title

Builder = TypeVar("Builder", bound=Callable[..., object])


def begin_table(title: str) -> None:
    TABLES[title] = []


def declare(name: str, holds: str = "", ends: str = "", saved: bool = False) -> str:
    """Adds a key to the present table, and returns its name. Another builder of a key says no more than the name."""
    if holds:
        [*TABLES.values()][-1].append(Key(name, holds, ends, saved))
    return name


def key(name: str, holds: str, ends: str, saved: bool = False) -> Callable[[Builder], Builder]:
    """Declares a key that a function builds."""
    declare(name, holds, ends, saved)
    return lambda build: build


def of_all(name: str, holds: str, ends: str, saved: bool = False) -> Callable[[str], str]:
    """Returns the function from an id to a key outside the partitions."""
    kind = declare(name, holds, ends, saved).partition(":<")[0]
    return lambda of: f"{kind}:{of}"


def of_partition(kind: str, holds: str = "", ends: str = "", saved: bool = False) -> Callable[[str], str]:
    """Returns the function from a partition's tag to its key."""
    declare(f"{{pNN}}:{kind}", holds, ends, saved)
    end = f":{kind}"  # made once, because requests build keys
    return lambda tag: tag + end


def in_partition(name: str, holds: str = "", ends: str = "", saved: bool = False) -> Callable[[str, str], str]:
    """Returns the function from a partition's tag and an id, such as that of an app, to a key of the partition."""
    declare(f"{{pNN}}:{name}", holds, ends, saved)
    middle = f":{name.partition(':<')[0]}:"
    return lambda tag, of: f"{tag}{middle}{of}"


def of_account(kind: str, holds: str = "", ends: str = "", saved: bool = False) -> Callable[[str], str]:
    """Returns the function from an account's id to its key."""
    declare(f"{{pNN}}:{kind}:<account>", holds, ends, saved)
    middle = f":{kind}:"
    return lambda account_id: f"{partition_tag(account_id)}{middle}{account_id}"


def in_account(name: str, holds: str, ends: str, saved: bool = False) -> Callable[[str, str], str]:
    """Returns the function from an account's id and another id to a key in the account's partition."""
    declare(f"{{pNN}}:{name}", holds, ends, saved)
    middle = f":{name.partition(':<')[0]}:"
    return lambda account_id, of: f"{partition_tag(account_id)}{middle}{of}"


def under_account(name: str, holds: str, ends: str, saved: bool = False) -> Callable[[str, str], str]:
    """Like `in_account`, with the account in the key: an app of the same id may later belong to another account."""
    kind, of = name.split(":")
    declare(f"{{pNN}}:{kind}:<account>:{of}", holds, ends, saved)
    middle = f":{kind}:"
    return lambda account_id, of: f"{partition_tag(account_id)}{middle}{account_id}:{of}"


class OfProvider(Protocol):
    def __call__(self, provider: str = DEFAULT_PROVIDER) -> str: ...


def of_provider(kind: str, holds: str = "", ends: str = "") -> OfProvider:
    """Returns the function from the name of a provider to its key.

    The only provider of an installation without a providers file has the names from before there were several.
    """
    declare(f"{kind}[:<name>]", holds, ends)
    return lambda provider=DEFAULT_PROVIDER: kind if provider == DEFAULT_PROVIDER else f"{kind}:{provider}"


def in_provider(kind: str, holds: str = "", ends: str = "") -> OfProvider:
    """Returns the function from the name of a provider to a key in the slot of its health."""
    declare(f"{{provider}}:{kind}", holds, ends)
    return lambda provider=DEFAULT_PROVIDER: f"{{{provider_key(provider)}}}:{kind}"


begin_table("Accounts and apps")

APP, ALIAS = "app", "alias"
app_key = of_all(
    "app:<name>", "string: an app's record, JSON; its secrets are encrypted", "when the app is deleted", SAVED
)
alias_key = of_all("alias:<id>", "string: name of the app with this id, if the two differ", "with the app", SAVED)
domain_key = of_all("domain:<name>", "string: id of the app that claims it, and since when, s", "with the app", SAVED)
former_name_key = of_all("former-name:<name>", "string: account whose deleted live app had this name", "30 days", SAVED)
api_key_key = of_all(
    "key:<sha256>", "string: `<account> <key id>` of this API key", "when it is revoked; 1 h until it is listed", SAVED
)
account_key = of_account("account", "string: an account's record, JSON", "with the account", SAVED)


@key("{pNN}:account:<account>:apps", "set: names of the account's apps", "with the account", SAVED)
def account_apps_key(account_id: str) -> str:
    return f"{account_key(account_id)}:apps"


app_lock_key = of_account("app-lock", "string: held while one app of the account is created or deleted", "15 s")
app_changes_key = of_account("app-changes", "string: number of attempts to create, change or delete an app", "60 s")
token_checks_key = of_account("token-checks", "string: number of tokens that the account holder checked", "60 s")
deleted_apps_key = of_account("deleted-apps", "list: its deleted apps, whose windows its next new apps inherit", "60 s")
domain_lookups_key = in_account("domain-lookups:<app id>", "string: number of verifications of its domains", "60 s")
accounts_key = of_partition("accounts", "zset: ids of the accounts, which sort by time", "each with the account", SAVED)
apps_key = of_partition("apps", "zset: ids of the partition's apps", "each with the app", SAVED)
deletions_key = of_partition("deletions", "zset: accounts being deleted, by time, ms", "each with the account", SAVED)
leaving_key = of_account("leaving", "set: ids and names of its apps during its deletion", "with the account", SAVED)
former_names_key = of_account("former-names", "set: names that `former-name:` withholds for it", "30 days", SAVED)
spend_of_deleted_key = of_account("spend-of-deleted", "hash: day → nano-euro, after its deletion", "400 days", SAVED)
suspended_key = of_partition("suspended", "hash: account or `app:<id>` → time, ms; `version`", "until resumed", SAVED)
api_keys_key = of_account("keys", "hash: key id → the record of a valid API key, JSON", "each when revoked; 26", SAVED)
scoped_keys_key = of_account(
    "scoped-keys", "hash: the same for keys whose scope is not full", "each when revoked", SAVED
)


def key_lists(account_id: str) -> list[str]:
    """Returns the keys of both lists, in the order in which a key moves from one to the other."""
    return [api_keys_key(account_id), scoped_keys_key(account_id)]


account_audit_key = of_account("audit", "stream: other changes by its keys and sessions: the last 5,000", "90 days")


@key("{pNN}:audit:<account>:rights", "stream: changes of keys, members, webhook and deletion: 5,000", "90 days")
@key("{pNN}:audit:<account>:operators", "stream: changes by operators: the last 5,000", "90 days")
def trail_stream_key(account_id: str, part: str) -> str:
    """Returns the key of one part of the account's trail; `part` is "" for changes that belong to no other part."""
    return f"{account_audit_key(account_id)}:{part}" if part else account_audit_key(account_id)


@key("{pNN}:audit:<account>:…:counts", "hash: entry of one of these streams → number of equal changes", "90 days")
def trail_counts_key(account_id: str, part: str) -> str:
    return f"{trail_stream_key(account_id, part)}:counts"


@key("{pNN}:audit:<account>:…:of:<hash>", "list: entries of one actor in one of these streams; 1,000", "90 days")
def trail_actor_key(account_id: str, part: str, hashed: str) -> str:
    return f"{trail_stream_key(account_id, part)}:of:{hashed}"


@key("{pNN}:audit:<account>:…:last:<hash>", "string: entry of a change, with which equal ones are counted", "60 s")
def trail_last_key(account_id: str, part: str, hashed: str) -> str:
    return f"{trail_stream_key(account_id, part)}:last:{hashed}"


api_keys_used_key = of_account("keys-used", "hash: key id → time of its last use, ms", "each when revoked", SAVED)
members_key = of_account("members", "string: e-mail address → role and time, JSON; 100", "with the account", SAVED)
invitations_key = of_account("invitations", "string: hash of an address → open invitation, JSON; 50", "14 days", SAVED)
invited_by_key = of_all(
    "invited-by:<sha256>", "zset: accounts that invite an address (its hash), by the end, ms; 1,000", "14 days", SAVED
)
memberships_key = of_all("memberships:<sha256>", "string: ids of an address's accounts; 50", "with the last", SAVED)

declare("{registrations}:<day>", "string: number of registrations on a UTC day", "2 days")
declare("{registrations}:<day>:anonymous", "string: number of those without a sign-in", "2 days")
REGISTRATIONS_KEY = "{registrations}"  # the day is appended, in the same slot
REGISTRATIONS_MOVING_KEY = "{registrations}:moving"  # never exists; `count_registration.lua` explains why

session_key = of_all(
    "session:<sha256>", "string: subject of a page's session: `<account> <key id>`, `operator:<hash>`, a person", "12 h"
)
sessions_key = of_all("sessions:<sha256>", "list: hashes of the newest 20 sessions of a subject, by its hash", "12 h")
logins_key = of_all("logins:<hash>", "string: failed log-ins from one network: an IPv4 address or an IPv6 /64", "60 s")
sign_in_key = of_all("sign-in:<sha256>", "string: mark of a sign-in that has come back from the provider", "10 min")
first_sign_in_key = of_all("first-sign-in:<sha256>", "string: mark of an address that is getting an account", "10 s")
registered_key = of_all(
    "registered:<hash>", "string: number of registrations from one network; `…:anonymous`: without a sign-in", "1 day"
)

begin_table("Inference")

INFERENCE_KEY = declare("inference", "string: the switch, the approval, the disabled providers, JSON", "never", SAVED)
provider_key = of_provider("provider", "string: the provider's health, JSON", "never: one record for each")
answers_of_provider_key = of_provider("provider-answers", "zset: accounts of its last two answers, by time, ms", "30 s")
trial_key = of_provider("provider-trial", "string: process whose request tries the unhealthy provider", "30 s")
probe_key = of_provider("probe", "string: id of the process that is probing the provider", "20 s")
refusal_key = of_provider("provider-refusal", "string: exists while the provider refuses for lack of quota", "2 s")
# In the slot of the provider's health, because both are written in one step.
failed_accounts_key = in_provider("failed", "string: accounts of its last failures in a row, JSON; 2", "10 min")

# In the order of `lease.lua`.
LEASE_KEYS = (
    declare("{provider}:state", "hash: state of all permits: `last` call, limit after a `cut`, …", "84 s"),
    declare("{provider}:permits", "hash: process → permits granted, returned; end of lease", "28 s, with its lease"),
    declare("{provider}:waiting", "hash: account → weight; process → requests, permits", "84 s, or when none waits"),
    declare("{provider}:order", "zset: waiting accounts by their virtual counter", "84 s, or when none waits"),
    declare("{provider}:past", "zset: virtual counters of accounts that waited before", "84 s, or when none waits"),
    declare("{provider}:leases", "zset: processes by the end of their lease, ms", "28 s, each with its lease"),
    declare("{provider}:waiters", "zset: the same for processes with waiting requests", "28 s, each with its lease"),
)
QUOTA_KEYS = (
    declare("{provider}:quota", "hash: held and spent of the quota; process → its budget", "144 s after the last call"),
    declare("{provider}:spent", "list: requests and tokens of the last minute, by second", "144 s, each after 60 s"),
)
permits_key, waiting_key = in_provider("permits"), in_provider("waiting")


def lease_keys(provider: str = DEFAULT_PROVIDER, *, rated: bool = False) -> list[str]:
    """Returns the keys of `lease.lua`. With a quota of the provider there are two more."""
    tag = f"{{{provider_key(provider)}}}"
    return [name.replace("{provider}", tag) for name in (LEASE_KEYS + QUOTA_KEYS if rated else LEASE_KEYS)]


_permits = of_provider("permits")


def permits_channel(provider: str = DEFAULT_PROVIDER, process: str = "") -> str:
    """Returns the channel for all processes, or that of one process."""
    return f"{_permits(provider)}:{process}" if process else _permits(provider)


@key("{pNN}:key-set:<app id>", "hash: the app's public keys, and when its backend sent them", "5 min")
@key("{pNN}:key-set-fetch:<app id>", "string: a process that fetches them has set it to their address", "6 s")
def key_set_keys(account_id: str, app_id: str) -> list[str]:
    """Returns the keys of the copy of an app's public keys, and of the process that fetches them."""
    return [f"{partition_tag(account_id)}:{kind}:{app_id}" for kind in ("key-set", "key-set-fetch")]


app_window_key = in_partition("window:app:<id>", "rate window: the app's admitted requests", "60 s")


@lru_cache(CACHE_SIZE)
def user_hash(user: str) -> str:
    """Returns the hash that stands for a user's id in Redis, which never sees the id itself."""
    return hashlib.sha256(user.encode()).hexdigest()[:32]


@key("{pNN}:window:user:<id>:<hash>", "rate window: the same for one user of the app", "60 s")
def user_window_key(tag: str, app_id: str, hashed: str) -> str:
    return f"{tag}:window:user:{app_id}:{hashed}"


spend_key = under_account(
    "spend:<day>", "hash: nano-euro of the day: `settled`, `reserved`; `…:<app>`, `…:deleted`", "35 days", SAVED
)
account_spend_prefix = of_account("spend")  # a script appends the day; the slot stays the same
spend_prefix = of_partition("spend")  # scripts append account and day or, for a user, `-by-user` and more


def app_spend_fields(app_id: str) -> list[str]:
    """Returns the fields of an account's spend that hold the settled and the reserved money of one app."""
    return [f"settled:{app_id}", f"reserved:{app_id}"]


@key("{pNN}:spend-by-user:<account>:<app id>:<hash>:<day>", "hash: the same for a user, under a cap", "2 days", SAVED)
def user_spend_prefix(account_id: str, app_id: str, hashed: str) -> str:
    """Returns a prefix to which a script appends the day; the slot stays the same."""
    return f"{spend_prefix(partition_tag(account_id))}-by-user:{account_id}:{app_id}:{hashed}"


# These have no expiry, but a test must settle all of its reservations.
@key("{pNN}:reservations", "hash: id → `<account> <day> <nano-euro> <app id>[ <hash>]`", "each when settled")
@key("{pNN}:leases", "zset: reservation ids by when they expire, ms", "each when settled")
@lru_cache
def reservation_keys(tag: str) -> tuple[str, str]:
    """Returns the keys of a partition's reservations, and of when they expire."""
    return f"{tag}:reservations", f"{tag}:leases"


settled_key = in_partition(
    "settled:<reservation>", "string: tombstone: nano-euro settled", "11 min after it would have expired"
)

begin_table("Usage and counters")

declare("{pNN}:usage:<account>:<hour>", "hash: `<app>/<model>/<count>` → number; about 1,000", "14 days", SAVED)
usage_key = under_account("usage:<day>", "hash: the same for a UTC day", "400 days", SAVED)
usage_by_provider_key = under_account(
    "usage-by-provider:<day>", "hash: `<provider>/<model>/<count>` → number", "400 days", SAVED
)
requests_key = of_account("request-log", "zset: its last 1,000 requests, JSON arrays by arrival, ms", "30 days", SAVED)


def usage_keys(account_id: str, hour: str) -> list[str]:
    """Returns the keys of the account's hour, such as `2026-07-02T12`, of that hour's day, also by provider, and of its
    requests.
    """
    day = hour.partition("T")[0]
    usage = [usage_key(account_id, hour), usage_key(account_id, day), usage_by_provider_key(account_id, day)]
    return [*usage, requests_key(account_id)]


spenders_key = of_all(
    "spend-by-account:<day>", "zset: accounts by their spend in nano-euro, and `total`", "400 days", SAVED
)
spend_by_provider_key = of_all(
    "spend-by-provider:<day>", "hash: `<provider>/<model>/<count>` of all accounts → number", "400 days", SAVED
)


minute_key = of_all(
    "{ops}:minute:<minute>", "hash: `requests`, `code:<CODE>`, `ttft:<ms>`, …: `gateway/telemetry/counters.py`", "2 h"
)
hour_key = of_all("{ops}:hour:<hour>", "hash: `requests`, `code:<CODE>` and `settled` of all accounts", "15 days")
provider_counts_key = of_all(
    "{ops}:providers:<day>", "hash: `<provider>:attempts` and `<provider>:failovers` of all gateways", "2 days"
)
PROCESSES_KEY = declare("{ops}:processes", "set: ids of the gateway processes", "15 s")
process_key = of_all("{ops}:process:<id>", "hash: open `streams`, `startedAt`, `seenAt`", "15 s")
BACKUP_KEY = declare("{ops}:backup", "string: time of the last backup, as in its name", "never: one record")
CLOCK_KEY = declare("{ops}:clock", "hash: the current `day`, `hour` and `minute` as in key names, for Grafana", "60 s")

begin_table("Events")


def stream_key(tag: str, stream: str) -> str:
    """Returns the key of the stream `events`, `builds` or `mails` of a partition."""
    return f"{tag}:{stream}"


webhook_key = of_account("webhook", "string: the receiver, JSON; its secret is encrypted", "when it is cleared", SAVED)
previous_secret_key = of_account("previous-secret", "string: secret before the last rotation, encrypted", "24 h", SAVED)
declare("{pNN}:events", "stream: events without an outcome yet; group `webhooks`", "each at its outcome; 100,000")
# The scripts build it from the key of the events.
stored_key = of_partition("events:stored", "zset: account → bytes of its bodies and its log", "never: one per account")
deliveries_key = of_account("deliveries", "stream: outcomes of the last 1,000 deliveries, with answers", "30 days")


@key("{pNN}:deliveries:<account>:bodies", "hash: event id → its data, JSON; with the log at most 8 MiB", "30 days")
def bodies_key(account_id: str) -> str:
    """Returns the key of the data of the account's events. The scripts build it from the log's key."""
    return f"{deliveries_key(account_id)}:bodies"


dead_letters_key = of_partition("dead", "stream: entries that no worker could process, the last 100", "30 days")
events_window_key = of_account("window:events", "rate window: its test events and redeliveries", "60 s")
redelivered_key = of_account("redelivered", "string: mark that all failed events were sent again", "60 s")
outcomes_key = of_partition("outcomes", "hash: outcome → number of deliveries", "never: a dozen fields", SAVED)
emitted_key = in_account("emitted:<event id>", "string: mark of a queued event, which is not queued again", "1 hour")
awaited_key = in_partition("awaited:<event id>", "string: outcome of `app.unhealthy` for its `app.recovered`", "2 days")
awaited_prefix = of_partition("awaited")


def event_keys(tag: str, account_id: str) -> list[str]:
    """Returns the keys of a script that queues an event.

    These are the partition's events, the account's log, the partition's outcomes, and two more. The scripts
    build the names of the last two themselves. The call declares them because, while a slot migrates, Redis runs a
    script only on the node that has all declared keys.
    """
    log, bodies = deliveries_key(account_id), bodies_key(account_id)
    return [stream_key(tag, "events"), log, outcomes_key(tag), bodies, stored_key(tag)]


begin_table("Notices by e-mail")

notices_key = of_account("notices", "hash: hash of an address → address and kinds, JSON", "when it ends all", SAVED)
declare("{pNN}:mails", "stream: notices to send, to hashes of addresses; group `notices`", "each at its end; 10,000")
mail_outcomes_key = of_partition("mails:outcomes", "hash: outcome → number of notices", "never: four fields")
noticed_key = under_account("noticed:<subject>", "string: level of the last notice of an event or a cap", "2 days")


@key("notices-on:<hash>:<day>", "string: number of notices that an address got on a UTC day", "2 days")
def notices_on_key(hashed: str, day: str) -> str:
    return f"notices-on:{hashed}:{day}"


@key("{pNN}:notices-on:<account>:<hash>:<day>", "string: number of those of one account", "2 days")
def account_notices_on_key(account_id: str, hashed: str, day: str) -> str:
    return f"{partition_tag(account_id)}:notices-on:{account_id}:{hashed}:{day}"


@key("invitations-on:<hash>:<day>", "string: number of invitations that an address got on a UTC day", "2 days")
def invitations_on_key(hashed: str, day: str) -> str:
    return f"invitations-on:{hashed}:{day}"


invitation_mails_key = of_account("invitation-mails", "string: number of invitations sent by e-mail", "1 day")
uninvited_key = of_all("uninvited:<sha256>", "string: mark: no invitations by e-mail", "400 days", SAVED)

begin_table("Deploys")

hook_key = of_all("hook:<sha256>", "string: a deploy hook, JSON", "when it is revoked", SAVED)
hooks_key = of_account("hooks", "hash: hook id → the hook's hash and record, JSON", "each when revoked; 100", SAVED)
hooks_used_key = of_account("hooks-used", "hash: hook id → time of its last use, ms", "each when revoked", SAVED)
hook_window_key = in_partition("window:hook:<id>", "rate window: the hook's triggers", "60 s")
site_key = in_account(
    "site:<app id>", "hash: `live`, `queued:<address>`, `preview:<address>`: deploys; `source`", "with the app", SAVED
)
site_prefix = of_partition("site")
previews_key = of_account(
    "previews", "zset: `<app id> <address>` of previews by last visit, s", "each at its end", SAVED
)
certified_names_key = of_account("certified-names", "zset: certifiable names by first request, s", "90 days", SAVED)
environment_key = under_account("environment:<app id>", "string: variables, encrypted; 64 KiB", "with the app", SAVED)
preview_environment_key = under_account(
    "preview-environment:<app id>",
    "string: variables that differ in previews, encrypted; 64 KiB",
    "with the app",
    SAVED,
)
deploy_key = in_account("deploy:<id>", "hash: a deploy's record", "90 days", SAVED)
deploy_prefix, tagged_deploy_key = of_partition("deploy"), in_partition("deploy")
deploy_log_key = in_account(
    "deploy-log:<id>", "string: log of a deploy in progress; at most 320 KiB", "2 days, or at its end"
)
deploys_key = of_account("deploys", "zset: ids of the last 1,000 deploys by time of queueing, ms", "90 days", SAVED)
deploys_on_key = under_account("deploys-on:<day>", "string: number of deploys on a UTC day", "2 days", SAVED)
deploys_on_prefix = of_account("deploys-on")  # a script appends the day, in the same slot
declare("{pNN}:builds", "stream: deploys waiting or in progress; group `deploys`", "each at its end; 10,000", SAVED)
failed_deploys_key = of_partition("builds:failed", "zset: failed `<account> <deploy>` by time, ms; 100", "1 day", SAVED)
# `queue_deploy.lua` appends it to the key of the builds.
ended_deploys_key = of_partition("builds:ended", "hash: final state → number of deploys", "never: three fields", SAVED)
BUILD_QUEUE_KEYS = [
    declare("{builds}:waiting", "hash: deploys that wait for a builder, JSON", "150 s"),
    declare("{builds}:running", "hash: deploys in progress and their builders, JSON", "150 s"),
    declare("{builds}:order", "zset: accounts by the number of their last build", "150 s"),
]
serving_key = in_account(
    "serving:<app id>", "hash: address → the release to serve, JSON; its secrets are encrypted", "with the app", SAVED
)
tagged_serving_key = in_partition("serving")
served_apps_key = of_partition("serving", "zset: app ids by the version of their last change", "with the app", SAVED)
answer_key = in_account("answer:<deploy id>", "string: progress of the engine with the deploy, JSON", "1 hour")
APPS_FOLDER_KEY = declare("{sites}:folder", "string: id of the apps' data folder, without shared storage", "7 days")
REPORTS_KEY = declare("{sites}:reports", "hash: host → its free disk and its missing releases, JSON", "90 s")
ENGINE_KEY = declare("{sites}:engine", "string: what serves the apps, a host or a cluster's worker, JSON", "15 s")
PODS_KEY = declare("{sites}:pods", "string: its report of nodes and pods, and of what waits for room, JSON", "60 s")
BUILD_POSITIONS_KEY = declare("build-positions", "string: queued deploy → its position and reason, JSON", "15 s")
FORMER_HOSTS_KEYS = ("{sites}:hosts", "{sites}:leases")  # of layout 1, as the next one
former_claims_key = of_partition("claims")

begin_table("Data")

data_status_key = under_account("data:<app id>", "string: reported bytes, state and problem, JSON", "7 days", SAVED)
data_snapshots_key = under_account("data-snapshots:<app id>", "hash: id → snapshot, JSON; 21", "with the app", SAVED)
data_snapshots_made_key = in_account("data-snapshots-made:<app id>", "string: number of snapshots on request", "1 hour")
deleted_data_key = of_account("data-deleted", "hash: record id → deleted app and its snapshots, JSON", "8 days", SAVED)
data_deletions_key = of_partition("data-deleted", "zset: `<account> <record id>` by time, ms", "after 7 days", SAVED)
data_commands_key = of_partition("data-commands", "hash: `<account> <id>` → command to the host, JSON", "7 days; 1,000")
data_answer_key = in_account("data-answer:<command id>", "string: the host's answer to a command, JSON", "1 hour")

begin_table("Monitors")

probes_key = of_partition("probes", "zset: app ids by the time of their next uptime probe, ms", "with the app", SAVED)
certificates_key = of_partition("certificates", "zset: app ids by their next check, ms", "with the app", SAVED)
certificate_ends_key = of_partition(
    "certificates:ends", "zset: app ids by the first end of a domain's certificate, ms", "with its domains", SAVED
)
domain_checks_key = of_partition("domain-checks", "zset: app ids by their next check, ms", "with the app", SAVED)
health_key = in_partition("health:<app id>", "hash: `version`; `state`, JSON", "with the app", SAVED)
certificate_key = in_partition(
    "certificate:<app id>",
    "hash: `version`; `certificates` of its domains, JSON; `expiresAt`: the first end, ms",
    "with its domains",
    SAVED,
)
domain_check_key = in_partition(
    "domain-check:<app id>",
    "hash: `version`; `missing`: since when domains are without their records, ms, JSON",
    "with its domains",
    SAVED,
)
unhealthy_key = of_partition("unhealthy", "zset: unhealthy apps by time, ms", "each when the app answers", SAVED)
findings_key = in_partition(
    "findings:<app id>", "hash: `version`; `open`: the last scan, JSON, 5,000; `red`, `yellow`", "with the app", SAVED
)
health_days_key = in_partition(
    "health-days:<app id>", "hash: `<day>:down`, ms, and `<day>:outages` of days with probes; 91", "91 days", SAVED
)
crashes_key = in_partition("crashes:<app id>", "stream: the last 20 crashes, with the last lines of output", "30 days")


def monitored_keys(tag: str, app_id: str) -> list[str]:
    """Returns the keys of all records that the monitors have of an app."""
    kinds = (health_key, health_days_key, certificate_key, domain_check_key, findings_key, crashes_key)
    return [kind(tag, app_id) for kind in kinds]


begin_table("Operation")

LAYOUT_KEY = declare("layout", "string: the number of the layout of these keys", "never: one number")
LAYOUT_MINOR_KEY = declare("layout-minor", "string: the number of changes that stop no version", "never: one number")
LAYOUT_LOCK_KEY = declare("layout-lock", "string: id of the process that upgrades the data to another layout", "30 s")
WORKERS_KEY = declare("{ops}:workers", "set: `<group>:<name>` of workers that read no stream; some have ended", "1 h")
audit_key = of_all("{ops}:audit:<trail>", "stream: operators' changes, or machines' reports; 10,000", "400 days")
HEARTBEAT_SECONDS = 15  # lifetime of a worker's heartbeat
WORKER_STARTS_SECONDS = 900  # for which a worker's start is remembered
WORKER_STARTS_KEY = declare(
    "{ops}:worker-starts", "zset: `<group>:<name>:<token>` of workers by the time of their start, s", "15 min"
)


@key("worker:<group>:<name>", "string: a worker's heartbeat, which reserves its name", "15 s")
def worker_key(group: str, name: str) -> str:
    return f"worker:{group}:{name}"


write_check_key = of_partition("write-check", "string: write probe: its value is not used", "60 s")

KEYS = [each for table in TABLES.values() for each in table]
BACKED_UP = frozenset(each.kind for each in KEYS if each.saved)
LEFT_OUT = frozenset(each.kind for each in KEYS) - BACKED_UP  # what is of this moment, or counts for seconds
