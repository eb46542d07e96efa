"""The scripts that queue deploys, move them from state to state, schedule builds, and set what hosts serve."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from gateway.events.records import QueuedEvent, flatten_event
from gateway.keys import (
    BUILD_QUEUE_KEYS,
    deploy_key,
    deploy_prefix,
    deploys_key,
    deploys_on_prefix,
    ended_deploys_key,
    event_keys,
    failed_deploys_key,
    hook_window_key,
    hooks_used_key,
    partition_tag,
    previews_key,
    served_apps_key,
    serving_key,
    site_key,
    stream_key,
)
from gateway.redis.client import Script, Store, flatten
from gateway.redis.scripts import CHANGES_CHANNEL

_QUEUE_DEPLOY = Script("deploys/queue_deploy", durable=True)
_ADVANCE_DEPLOY = Script("deploys/advance_deploy", durable=True)
_SET_SERVING = Script("deploys/set_serving", durable=True)
_SCHEDULE_BUILDS = Script("deploys/schedule_builds")


class QueueReply(msgspec.Struct, frozen=True):
    verdict: Literal["queued", "rate", "suspended", "never-live", "source-gone", "quota", "full"]
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
    suspended: bool,
    quota: int,
    source: str,
    has_repository: bool,
) -> QueueReply:
    """Queues a deploy of an app, if the hook's rate (triggers in 60 seconds) and the day's quota allow it.

    Nothing is queued while the app is suspended, but the hook's call counts.

    `hook` is '' for other triggers. `source` is the id of a stored source, or '' for the repository or the live source.
    The deploy replaces a queued one of the same `address`, which is canceled at the time `now`.
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
        "1" if suspended else "",
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
    return QueueReply(verdict, int(retry_in))


class Transition(msgspec.Struct, frozen=True):
    """A deploy's transition from one state to another, with its consequences."""

    account: str
    app: str  # id
    deploy: str
    expected: str  # the present state
    fields: Mapping[str, str]  # of the record, including the new state
    event: QueuedEvent | None = None
    dequeue: bool = False  # remove the deploy from the stream of builds
    live: bool = False  # the app serves the deploy from now on
    source: str = ""  # its stored source, which hooks build again; '' for none


async def advance_deploy(store: Store, transition: Transition) -> bool:
    """Returns False if the deploy is not in the expected state."""
    tag = partition_tag(transition.account)
    reply = await store.run_script(
        _ADVANCE_DEPLOY,
        [
            deploy_key(transition.account, transition.deploy),
            site_key(transition.account, transition.app),
            stream_key(tag, "builds"),
            *event_keys(tag, transition.account),
            ended_deploys_key(tag),
            failed_deploys_key(tag),
            previews_key(transition.account),
        ],
        transition.expected,
        "1" if transition.dequeue else "",
        transition.deploy if transition.live else "",
        transition.source,
        *(("", "", "", "", "") if transition.event is None else flatten_event(transition.event)),
        *flatten(transition.fields),
    )
    return bool(reply)


async def set_serving(
    store: Store, account: str, app: str, deploy: str, state: str, address: str, before: str, after: str
) -> bool:
    """Sets the address's record (JSON) if the deploy is in `state` ('' for any) and the record is still `before`.

    '' stands for no record.
    """
    script_keys = [deploy_key(account, deploy), serving_key(account, app)]
    script_keys.append(served_apps_key(partition_tag(account)))
    arguments = state, app, address, before, after, CHANGES_CHANNEL
    return bool(await store.run_script(_SET_SERVING, script_keys, *arguments))


async def schedule_builds(
    store: Store, builder: str, waiting: Mapping[str, str], running: Mapping[str, str], held_for: int, slots: int
) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Returns the granted deploys with tag and entry, and those that wait here but run at another builder.

    `waiting` and `running` map deploys to JSON. `held_for` is in ms. An account without a running build can use one
    slot more than `slots`.
    """
    args = (builder, held_for, slots, 1, len(waiting), *flatten(waiting), *flatten(running))
    granted, elsewhere = await store.run_script(_SCHEDULE_BUILDS, BUILD_QUEUE_KEYS, *args)
    return list(zip(granted[::3], granted[1::3], granted[2::3], strict=True)), list(elsewhere)
