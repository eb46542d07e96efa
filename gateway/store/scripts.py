"""The Lua scripts of `lua/`: one typed function for each, and nothing else runs one.

A function builds its script's keys, flattens its arguments and turns the reply into a struct. It raises
BackboneUnavailable when Redis fails: the script may have run then, and only its answer been lost. BackboneRefused, a
kind of it, means that Redis answered with an error and changed nothing. What a script decides, and which race it
prevents, stands at the head of its Lua file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from gateway.errors import NotReplicated
from gateway.store import keys
from gateway.store.client import Script, Store
from gateway.store.event_records import (
    Delivery,
    LoggedEvent,
    Ownership,
    QueuedEvent,
    Requested,
    flat_delivery,
    flat_marks,
)
from gateway.store.lease_replies import BudgetCall, LeaseAnswer, LeaseCall, read_lease_answer
from gateway.store.reservations import Decision, ReservationRecord, Settlement, Window

_ADD_KEY = Script("add_key", durable=True)
_ADMIT = Script("admit")
_ADVANCE = Script("advance", durable=True)
_ATTEND = Script("attend")
_BEGIN = Script("begin")
_BURY = Script("bury")
_CHANGE = Script("change", durable=True)
_COUNT = Script("count")
_DIRECT = Script("direct", durable=True)
_DUE = Script("due")
_EMIT = Script("emit")
_FIND_KEY_SET = Script("find_key_set")
_FINISH = Script("finish")
_FORGET_STORED = Script("forget_stored")
_FORGET_APP = Script("forget_app")
_KEEP = Script("keep")
_LEASE = Script("lease")
_OBSERVE = Script("observe")
_OVERDUE = Script("overdue")
_RECORD_USAGE = Script("record_usage")
_REDELIVER = Script("redeliver", durable=True)
_REGISTER = Script("register")
_REQUEST_EVENT = Script("request_event", durable=True)
_REVOKE_KEY = Script("revoke_key", durable=True)
_SETTLE = Script("settle")
_SHARE_KEY_SET = Script("share_key_set")
_TAKE_TURNS = Script("take_turns")
_TRIGGER = Script("trigger", durable=True)
_USE_KEYS = Script("use_keys")


def _flat(fields: Mapping[str, str | int]) -> list[str | int]:
    return [part for pair in fields.items() for part in pair]


def _flat_event(event: QueuedEvent) -> tuple[str, str, str, str, str]:
    return event.id, event.account, event.app, event.type, event.data


# -- records -------------------------------------------------------------------------------------------------


async def change(
    store: Store, key: str, value: str, *, expected: str | None = None, beside: tuple[str, str, int] | None = None
) -> bool:
    """Writes a record ('' removes it) and announces the change; with `expected`, only if the record holds that.

    `beside` is written with it: another key of the partition, its value ('' removes it), and the seconds that it lives.
    """
    script_keys, check = [key], "any" if expected is None else "same"
    args: list[str | int] = [keys.CHANGES, check, expected or "", value]
    if beside is not None:
        script_keys, args = [key, beside[0]], [*args, *beside[1:]]
    return bool(await store.run_script(_CHANGE, script_keys, *args))


class Registration(msgspec.Struct, frozen=True):
    accepted: bool
    resets_in: int  # seconds until 00:00 UTC


async def register(store: Store, per_day: int) -> Registration:
    """Counts a registration if today has room for one more."""
    accepted, resets_in = await store.run_script(_REGISTER, [keys.REGISTRATIONS, keys.REGISTRATIONS_MOVING], per_day)
    return Registration(bool(accepted), int(resets_in))


async def add_key(store: Store, account: str, key: str, record: str, limit: int) -> bool:
    """Adds an API key (its id) to the account's, or leaves it there; False if the account has `limit` others."""
    return bool(await store.run_script(_ADD_KEY, [keys.api_keys_key(account)], key, record, limit))


class Revocation(msgspec.Struct, frozen=True):
    verdict: Literal["revoked", "last", "unknown"]
    record: str  # of the key that was revoked; otherwise ''


async def revoke_key(store: Store, account: str, key: str) -> Revocation:
    """Removes an API key (its id) from the account's, unless it is the only one."""
    script_keys = [keys.api_keys_key(account), keys.api_keys_used_key(account)]
    return Revocation(*await store.run_script(_REVOKE_KEY, script_keys, key))


async def use_keys(store: Store, account: str, used: Sequence[str]) -> int:
    """Sets the last use of those API keys (ids) that the account has to now; returns how many it has."""
    script_keys = [keys.api_keys_key(account), keys.api_keys_used_key(account)]
    return int(await store.run_script(_USE_KEYS, script_keys, *used))


async def forget_app(store: Store, account: str, app: str, day: str) -> bool:
    """Adds what a deleted app spent on the day to one number for all of them, if nothing is reserved for it."""
    return bool(await store.run_script(_FORGET_APP, [keys.spend_key(account, day)], app))


# -- money ---------------------------------------------------------------------------------------------------


async def admit(
    store: Store,
    account: str,
    app: str,
    user: str,
    *,
    app_limit: int,
    user_limit: int,
    bound: int,
    cap: int,
    reservation: str,
    lease: int,
    deadline: int,
    app_cap: int | None = None,
    user_cap: int | None = None,
) -> Decision:
    """Decides on a request of an app's user and reserves `bound`.

    Limits are requests in 60 seconds, `bound` and the caps nano-euro (a bound of 0 reserves nothing), `lease` is in
    milliseconds. A call that reaches Redis after `deadline` (Redis's clock, milliseconds; 0: none) takes nothing.
    Raises NotReplicated if too few replicas have the reservation.
    """
    tag, replicated = keys.tag(account), bound > 0 and store.replicas > 0
    hashed = keys.user_hash(user)
    windows = (keys.app_window_key(tag, app), keys.user_window_key(tag, app, hashed))
    script_keys = [*windows, keys.account_spend_prefix(account), *keys.reservation_keys(tag)]
    args: tuple[str | int, ...] = (app_limit, user_limit, bound, cap, reservation, account, lease, deadline, app)
    if user_cap is not None:
        script_keys.append(keys.user_spend_prefix(account, app, hashed))
        args = (*args, "" if app_cap is None else app_cap, hashed, user_cap)
    elif app_cap is not None:
        args = (*args, app_cap)
    reply = await store.run_script(_ADMIT, script_keys, *args, replicated=replicated)
    if replicated:
        reply, replicas = reply
        if replicas < store.replicas and reply[0] == "ok":
            raise NotReplicated
    verdict, day, app_count, app_frees, user_count, user_frees, now, settled = reply
    app_window, user_window = Window(app_count, int(app_frees)), Window(user_count, int(user_frees))
    return Decision(verdict, day, app_window, user_window, int(now), int(settled))


async def settle(
    store: Store, tag: str, reservation: str, cost: int | None, record: ReservationRecord | None = None
) -> Settlement:
    """Ends a reservation of the partition `tag` at `cost` nano-euro, at most its bound; None means the bound.

    It may be repeated. If Redis has lost the reservation, `record` is what it is booked by.
    """
    script_keys = [*keys.reservation_keys(tag), keys.spend_prefix(tag), keys.settled_key(tag, reservation)]
    known = () if record is None else msgspec.structs.astuple(record)
    amount = "bound" if cost is None else cost
    return Settlement(*await store.run_script(_SETTLE, script_keys, reservation, amount, *known))


async def overdue(store: Store, tag: str, limit: int) -> list[str]:
    """Ids of reservations whose lease is over, the longest overdue first."""
    _, leases = keys.reservation_keys(tag)
    reservations: list[str] = await store.run_script(_OVERDUE, [leases], limit)
    return reservations


async def count(store: Store, key: str, kind: str, ttl: int, counts: Mapping[str, int]) -> None:
    """Adds `counts` to the counters at `key`, a hash or a zset as `kind` says, which then lives `ttl` seconds."""
    await store.run_script(_COUNT, [key], kind, ttl, *_flat(counts))


async def record_usage(
    store: Store, account: str, hour: str, counts: Mapping[str, int], requests: Sequence[str]
) -> None:
    """Adds `counts` to the account's hour and its day, and `requests` (JSON, the newest last) to its log."""
    args = (len(requests), *requests, *_flat(counts))
    await store.run_script(_RECORD_USAGE, keys.usage_keys(account, hour), *args)


# -- permits of the provider ---------------------------------------------------------------------------------


async def lease(
    store: Store,
    process: str,
    call: LeaseCall,
    demand: Mapping[str, tuple[float, int, int, int]],
    *,
    want: int,
    cut: bool,
    leave: bool,
    bound: int,
    length: int,
    budget: BudgetCall | None = None,
) -> LeaseAnswer | None:
    """Renews a process's lease for `length` ms, returns permits, and takes grants; None if a later call overtook it.

    `demand` maps each account of which one has changed to its weight, its waiting requests, its permits in use and the
    tokens that the next of its requests needs; `want` is the number of spare permits to take. Only a provider with a
    quota needs `budget`.
    """
    counts = (call.epoch, call.number, call.granted, call.returned, call.used, call.waiting, want)
    flags = (int(cut), int(leave), bound, length, keys.PERMITS)
    flat_demand: list[str | int] = []
    for account, (weight, waiting, used, tokens) in demand.items():
        flat_demand += (account, f"{weight:g}", waiting, used)
        if budget is not None:
            flat_demand.append(tokens)
    script_keys, rate = keys.lease_keys(rated=budget is not None), () if budget is None else budget.flat()
    reply = await store.run_script(_LEASE, script_keys, process, *counts, *flags, *rate, *flat_demand)
    return read_lease_answer(reply)


# -- public keys of apps -------------------------------------------------------------------------------------


class FoundKeySet(msgspec.Struct, frozen=True):
    verdict: Literal["copy", "fetch", "wait"]
    age: int = 0  # ms
    digest: str = ""
    document: str = ""


async def find_key_set(store: Store, account: str, app: str, identity: str, *, oldest: int, claim: int) -> FoundKeySet:
    """The shared copy of an app's keys, at most `oldest` ms old, or who fetches them, under a claim of `claim` ms."""
    script_keys = keys.key_set_keys(account, app)
    return FoundKeySet(*await store.run_script(_FIND_KEY_SET, script_keys, identity, oldest, claim))


async def share_key_set(
    store: Store, account: str, app: str, identity: str, *, age: int, life: int, digest: str, document: str
) -> None:
    """Shares a document of keys that is `age` ms old, for `life` ms since then; '' only gives the claim back."""
    script_keys = keys.key_set_keys(account, app)
    await store.run_script(_SHARE_KEY_SET, script_keys, identity, age, life, digest, document)


# -- events --------------------------------------------------------------------------------------------------


async def emit(store: Store, event: QueuedEvent, *, once: bool = False) -> None:
    """Queues an event. With `once`, a repetition under the same id within an hour changes nothing."""
    marker = [keys.emitted_key(event.account, event.id)] if once else []
    script_keys = [*keys.event_keys(keys.tag(event.account), event.account), *marker]
    await store.run_script(_EMIT, script_keys, *_flat_event(event))


async def request_event(store: Store, account: str, event: str, sample: QueuedEvent | None, *, limit: int) -> Requested:
    """Queues a sample, or the event of this id from the account's log, if fewer than `limit` passed in 60 seconds."""
    script_keys = [*keys.event_keys(keys.tag(account), account), keys.events_window_key(account)]
    content = () if sample is None else (sample.app, sample.type, sample.data)
    verdict, retry_in = await store.run_script(_REQUEST_EVENT, script_keys, limit, event, account, *content)
    return Requested(verdict, int(retry_in))


async def redeliver(store: Store, account: str, events: Sequence[LoggedEvent]) -> int:
    """Queues those events again that do not wait already, while there is room; returns how many."""
    script_keys = keys.event_keys(keys.tag(account), account)
    args: list[str | int] = [account]
    for event in events:
        marks = flat_marks(sample=event.sample, redelivery=event.redelivery + 1)
        args += [event.id, event.app, event.type, *marks, event.entries]
    return int(await store.run_script(_REDELIVER, script_keys, *args))


async def begin(
    store: Store, tag: str, account: str, event: str, *, group: str, consumer: str, entry: str
) -> Ownership:
    """Confirms that an entry of the partition's events is this consumer's, and restarts its idle time."""
    script_keys = [keys.stream_key(tag, "events"), keys.webhook_key(account), keys.bodies_key(account)]
    script_keys.append(keys.previous_secret_key(account))
    owned, *found = await store.run_script(_BEGIN, script_keys, group, consumer, entry, event)
    return Ownership(bool(owned), *found)


async def finish(store: Store, tag: str, event: QueuedEvent, delivery: Delivery, *, group: str, entry: str) -> bool:
    """Logs the outcome of an event and removes it from the stream; False if another worker had done so before."""
    script_keys = [*keys.event_keys(tag, event.account), keys.awaited_key(tag, event.id)]
    fields = (event.id, event.account, event.app, event.type)
    marks = flat_marks(sample=event.sample, redelivery=event.redelivery)
    return bool(await store.run_script(_FINISH, script_keys, group, entry, *fields, *flat_delivery(delivery), *marks))


async def bury(
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
    """Moves an entry to the partition's dead letters; False if it had been finished before.

    With an `event`, the account's log records it as failed.
    """
    dead = msgspec.json.encode({name[:64]: value[:256] for name, value in list(fields.items())[:16]}).decode()
    script_keys, about = [keys.stream_key(tag, stream), keys.dead_letters_key(tag)], []
    if event is not None:
        script_keys += keys.event_keys(tag, event.account)[1:]
        marks = flat_marks(sample=event.sample, redelivery=event.redelivery)
        about = [event.id, event.account, event.app, event.type, *marks]
    return bool(await store.run_script(_BURY, script_keys, group, entry, stream, reason, dead, *about))


async def forget_stored(store: Store, account: str) -> bool:
    """Removes what was counted of the account's log and bodies; False while one of them exists."""
    script_keys = [keys.deliveries_key(account), keys.bodies_key(account), keys.stored_key(keys.tag(account))]
    return bool(await store.run_script(_FORGET_STORED, script_keys, account))


async def keep(store: Store, stream: str, *, group: str, consumer: str, idle: int, entries: Sequence[str]) -> int:
    """Sets the idle time (ms) of those entries that are pending for the consumer; returns how many are."""
    return int(await store.run_script(_KEEP, [stream], group, consumer, idle, *entries))


# -- monitors ------------------------------------------------------------------------------------------------


class DueApp(msgspec.Struct, frozen=True):
    id: str
    live: bool
    known: dict[str, str]  # what the monitor recorded of it


class DueApps(msgspec.Struct, frozen=True):
    now: int  # Redis's clock, milliseconds
    apps: list[DueApp]


async def due(store: Store, tag: str, schedule: str, known: str, *, limit: int, lease: int) -> DueApps:
    """Takes the apps that are due in the zset `schedule` for `lease` milliseconds; `known` prefixes their records."""
    script_keys = [schedule, keys.site_prefix(tag), known]
    now, *found = await store.run_script(_DUE, script_keys, limit, lease)
    apps = [DueApp(id, bool(live), dict(zip(flat[::2], flat[1::2], strict=True))) for id, live, flat in found]
    return DueApps(int(now), apps)


async def observe(
    store: Store,
    record: str,
    *,
    app: str,
    account: str,
    version: str,
    next_version: str,
    fields: Mapping[str, str | int],
    events: Sequence[QueuedEvent],
    schedule: str | None = None,
    due_in: int = 0,
) -> bool:
    """Writes what a monitor saw of an app (id), and queues the events that follow, in one step.

    Without `fields` the record stays as it is. With a `schedule` (a zset) the app is due again in `due_in` ms. Returns
    False if the record no longer has the `version` that was read ('' for none), or the app is not in the schedule.
    """
    tag = keys.tag(account)
    script_keys = [record, *keys.event_keys(tag, account), keys.awaited_prefix(tag)]
    script_keys += [] if schedule is None else [schedule]
    flat_fields, flat_events = _flat(fields), [part for event in events for part in _flat_event(event)]
    head = (version, next_version, app, due_in, len(flat_fields))
    return bool(await store.run_script(_OBSERVE, script_keys, *head, *flat_fields, *flat_events))


# -- deploys -------------------------------------------------------------------------------------------------


class Triggered(msgspec.Struct, frozen=True):
    verdict: Literal["queued", "rate", "never-live", "source-gone", "quota", "full"]
    retry_in: int  # microseconds until the hook's next trigger can pass


async def trigger(
    store: Store,
    account: str,
    app: str,
    deploy: str,
    record: Mapping[str, str],
    *,
    address: str,
    now: str,
    hook: str,
    hook_limit: int,
    quota: int,
    source: str,
    has_repository: bool,
) -> Triggered:
    """Queues a deploy of an app, if the hook's rate (triggers in 60 seconds) and the day's quota allow it.

    `hook` is '' for other triggers. `source` names a stored source; '' means the repository or the live source.
    It replaces the deploy that is queued for the same `address`, which ends as canceled at the time `now`.
    """
    tag = keys.tag(account)
    verdict, retry_in, _ = await store.run_script(
        _TRIGGER,
        [
            keys.hook_window_key(tag, hook),
            keys.hooks_used_key(account),
            keys.site_key(account, app),
            keys.deploys_on_prefix(account),
            keys.deploy_key(account, deploy),
            keys.deploys_key(account),
            keys.stream_key(tag, "builds"),
            keys.deploy_prefix(tag),
        ],
        hook,
        hook_limit,
        quota,
        source,
        "1" if has_repository else "",
        deploy,
        account,
        app,
        address,
        now,
        *_flat(record),
    )
    return Triggered(verdict, int(retry_in))


class Advance(msgspec.Struct, frozen=True):
    """A deploy's move from one state to another, with what follows from it."""

    account: str
    app: str  # id
    deploy: str
    expected: str  # the state it is in
    fields: Mapping[str, str]  # of the record, the new state included
    event: QueuedEvent | None = None
    dequeue: bool = False  # take it from the stream of builds
    live: bool = False  # the deploy is what the app serves from now on
    source: str = ""  # its stored source, from which a hook deploys again


async def advance(store: Store, move: Advance) -> bool:
    """Returns False if the deploy is not in the expected state."""
    tag = keys.tag(move.account)
    reply = await store.run_script(
        _ADVANCE,
        [
            keys.deploy_key(move.account, move.deploy),
            keys.site_key(move.account, move.app),
            keys.stream_key(tag, "builds"),
            *keys.event_keys(tag, move.account),
            keys.ended_deploys_key(tag),
            keys.failed_deploys_key(tag),
        ],
        move.expected,
        "1" if move.dequeue else "",
        move.deploy if move.live else "",
        move.source,
        *(("", "", "", "", "") if move.event is None else _flat_event(move.event)),
        *_flat(move.fields),
    )
    return bool(reply)


async def attend(store: Store, host: str, lifetime: int) -> list[str]:
    """Renews a host's heartbeat ('' for none); returns the hosts with one of the last `lifetime` ms."""
    return list(await store.run_script(_ATTEND, [keys.SITES_HOSTS], host, lifetime))


async def direct(
    store: Store, account: str, app: str, deploy: str, state: str, address: str, before: str, after: str
) -> bool:
    """Says what to serve at an address (JSON), while the deploy is in `state` ('' for any) and the record `before`."""
    script_keys = [keys.deploy_key(account, deploy), keys.serving_key(account, app)]
    script_keys.append(keys.served_apps_key(keys.tag(account)))
    return bool(await store.run_script(_DIRECT, script_keys, state, app, address, before, after))


async def take_turns(
    store: Store, builder: str, waiting: Mapping[str, str], running: Mapping[str, bool], lease: int, slots: int
) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Deploys whose turn it is, with tag and entry, and those of `waiting` (deploy → JSON) that run elsewhere.

    `running` says which build. `lease` is in ms; one more than `slots` is for an account that builds nothing.
    """
    flags = {deploy: "1" if builds else "" for deploy, builds in running.items()}
    args = (builder, lease, slots, 1, len(waiting), *_flat(waiting), *_flat(flags))
    granted, elsewhere = await store.run_script(_TAKE_TURNS, keys.turn_keys(), *args)
    return list(zip(granted[::3], granted[1::3], granted[2::3], strict=True)), list(elsewhere)
