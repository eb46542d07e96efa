"""The scripts that queue deploys, move them from state to state, and say what hosts serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from gateway.deploys.keys import (
    HOSTS_KEY,
    build_queue_keys,
    deploy_key,
    deploy_prefix,
    deploys_key,
    deploys_on_prefix,
    ended_deploys_key,
    failed_deploys_key,
    hook_window_key,
    hooks_used_key,
    served_apps_key,
    serving_key,
    site_key,
)
from gateway.events.keys import event_keys
from gateway.events.records import QueuedEvent, flat_event
from gateway.redis.client import Script, Store, flatten
from gateway.redis.partitions import partition_tag, stream_key

_QUEUE_DEPLOY = Script("deploys/queue_deploy", durable=True)
_ADVANCE_DEPLOY = Script("deploys/advance_deploy", durable=True)
_HEARTBEAT_HOST = Script("deploys/heartbeat_host")
_SET_SERVING = Script("deploys/set_serving", durable=True)
_SCHEDULE_BUILDS = Script("deploys/schedule_builds")


class QueueAnswer(msgspec.Struct, frozen=True):
    verdict: Literal["queued", "rate", "never-live", "source-gone", "quota", "full"]
    retry_in: int  # microseconds until the hook's next trigger can pass


async def queue_deploy(
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
) -> QueueAnswer:
    """Queues a deploy of an app, if the hook's rate (triggers in 60 seconds) and the day's quota allow it.

    `hook` is '' for other triggers. `source` names a stored source; '' means the repository or the live source.
    It replaces the deploy that is queued for the same `address`, which ends as canceled at the time `now`.
    """
    tag = partition_tag(account)
    verdict, retry_in, _ = await store.run_script(
        _QUEUE_DEPLOY,
        [
            hook_window_key(tag, hook),
            hooks_used_key(account),
            site_key(account, app),
            deploys_on_prefix(account),
            deploy_key(account, deploy),
            deploys_key(account),
            stream_key(tag, "builds"),
            deploy_prefix(tag),
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
        *flatten(record),
    )
    return QueueAnswer(verdict, int(retry_in))


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


async def advance_deploy(store: Store, move: Advance) -> bool:
    """Returns False if the deploy is not in the expected state."""
    tag = partition_tag(move.account)
    reply = await store.run_script(
        _ADVANCE_DEPLOY,
        [
            deploy_key(move.account, move.deploy),
            site_key(move.account, move.app),
            stream_key(tag, "builds"),
            *event_keys(tag, move.account),
            ended_deploys_key(tag),
            failed_deploys_key(tag),
        ],
        move.expected,
        "1" if move.dequeue else "",
        move.deploy if move.live else "",
        move.source,
        *(("", "", "", "", "") if move.event is None else flat_event(move.event)),
        *flatten(move.fields),
    )
    return bool(reply)


async def heartbeat_host(store: Store, host: str, lifetime: int) -> list[str]:
    """Renews a host's heartbeat ('' for none); returns the hosts with one of the last `lifetime` ms."""
    return list(await store.run_script(_HEARTBEAT_HOST, [HOSTS_KEY], host, lifetime))


async def set_serving(
    store: Store, account: str, app: str, deploy: str, state: str, address: str, before: str, after: str
) -> bool:
    """Says what to serve at an address (JSON), while the deploy is in `state` ('' for any) and the record `before`."""
    script_keys = [deploy_key(account, deploy), serving_key(account, app)]
    script_keys.append(served_apps_key(partition_tag(account)))
    return bool(await store.run_script(_SET_SERVING, script_keys, state, app, address, before, after))


async def schedule_builds(
    store: Store, builder: str, waiting: Mapping[str, str], running: Mapping[str, bool], lease: int, slots: int
) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Deploys whose turn it is, with tag and entry, and those of `waiting` (deploy → JSON) that run elsewhere.

    `running` says which build. `lease` is in ms; one more than `slots` is for an account that builds nothing.
    """
    flags = {deploy: "1" if builds else "" for deploy, builds in running.items()}
    args = (builder, lease, slots, 1, len(waiting), *flatten(waiting), *flatten(flags))
    granted, elsewhere = await store.run_script(_SCHEDULE_BUILDS, build_queue_keys(), *args)
    return list(zip(granted[::3], granted[1::3], granted[2::3], strict=True)), list(elsewhere)
