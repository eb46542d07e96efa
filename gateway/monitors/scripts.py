"""The scripts that take apps for inspection, and record observations."""

from collections.abc import Mapping, Sequence

import msgspec

from gateway.events.records import QueuedEvent, flatten_event
from gateway.keys import awaited_prefix, event_keys, partition_tag, site_prefix
from gateway.redis.client import Script, Store, flatten

_TAKE_DUE_APPS = Script("monitors/take_due_apps")
_POSTPONE_APPS = Script("monitors/postpone_apps")
_RECORD_OBSERVATION = Script("monitors/record_observation")


class DueApp(msgspec.Struct, frozen=True):
    id: str
    live: bool
    known: dict[str, str]  # the monitor's record of it


class DueApps(msgspec.Struct, frozen=True):
    now: int  # Redis's clock, milliseconds
    held_until: int  # by the same clock
    apps: list[DueApp]


async def take_due_apps(store: Store, tag: str, schedule: str, known: str, *, limit: int, held_for: int) -> DueApps:
    """Takes the apps that are due in the zset `schedule`, for `held_for` ms. `known` is the prefix of their records."""
    script_keys = [schedule, site_prefix(tag), known]
    now, held_until, *found = await store.run_script(_TAKE_DUE_APPS, script_keys, limit, held_for)
    apps = [DueApp(id, bool(live), dict(zip(flat[::2], flat[1::2], strict=True))) for id, live, flat in found]
    return DueApps(int(now), int(held_until), apps)


async def postpone_apps(store: Store, schedule: str, again: Mapping[str, int], *, held_until: int) -> None:
    """Sets when taken apps (ids) are due again, in ms, unless they have become due earlier meanwhile."""
    await store.run_script(_POSTPONE_APPS, [schedule], held_until, *flatten(again))


async def record_observation(
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
    held_until: int = 0,
    due_in: int = 0,
) -> bool:
    """Records an observation of an app (id) and queues the events that follow, in one step.

    Without `fields` the record stays as it is. With a `schedule` (a zset) the app is due again in `due_in` ms, unless
    it has become due before `held_until` (ms). Returns False if the record no longer has the
    `version` that was read ('' for none), or the app is not in the schedule.
    """
    tag = partition_tag(account)
    script_keys = [record, *event_keys(tag, account), awaited_prefix(tag)]
    script_keys += [] if schedule is None else [schedule]
    flat_fields, flat_events = flatten(fields), [part for event in events for part in flatten_event(event)]
    head = (version, next_version, app, held_until, due_in, len(flat_fields))
    return bool(await store.run_script(_RECORD_OBSERVATION, script_keys, *head, *flat_fields, *flat_events))
