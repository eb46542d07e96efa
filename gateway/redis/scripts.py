"""Runs the Lua scripts that belong to no domain.

In every `scripts.py`, a function builds its script's keys, flattens its arguments and turns the reply into a struct. It
raises BackboneUnavailable when Redis fails; the script may have run, and only its reply been lost. The subclass
BackboneRefused means that Redis answered with an error and changed nothing. The header of each Lua file says what the
script decides and which race it prevents.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.redis.client import Script, Store, flatten

CHANGES_CHANNEL = "changes"

_COMPARE_AND_SET = Script("compare_and_set", durable=True)
_HOLD_KEY = Script("hold_key")
_INCREMENT_COUNTERS = Script("increment_counters")
_SET_ENTRY_IDLE = Script("set_entry_idle")


class Companion(NamedTuple):
    """Another key of the partition, which is written in the same step as a record."""

    key: str
    value: str  # '' removes the key
    seconds: int  # after which it expires
    expected: str | None = None  # with a value ('' for none), nothing is written unless the key has it


async def compare_and_set(
    store: Store, key: str, value: str, *, expected: str | None = None, companion: Companion | None = None
) -> bool:
    """Writes a record ('' removes it) and announces the change. With `expected`, only if that is the record's value.

    `companion` is written in the same step.
    """
    script_keys, check = [key], "any" if expected is None else "same"
    args: list[str | int] = [CHANGES_CHANNEL, check, expected or "", value]
    if companion is not None:
        script_keys, args = [key, companion.key], [*args, companion.value, companion.seconds]
        if companion.expected is not None:
            args.append(companion.expected)
    return bool(await store.run_script(_COMPARE_AND_SET, script_keys, *args))


class Location(NamedTuple):
    """Where the holder of a key must be. It is remembered for longer than the hold."""

    key: str
    name: str  # '' for any
    seconds: int  # after the last renewal of the hold, for which it is remembered


async def hold_key(store: Store, key: str, holder: str, lifetime: int, *, location: Location | None = None) -> str:
    """Takes or renews the hold of a key, for `lifetime` ms (0 ends it). Returns who holds it now.

    '' means nobody: if the hold was not to end, the holder must be at another location.
    """
    if location is None:
        return str(await store.run_script(_HOLD_KEY, [key], holder, lifetime))
    return str(
        await store.run_script(_HOLD_KEY, [key, location.key], holder, lifetime, location.name, location.seconds)
    )


async def increment_counters(store: Store, key: str, kind: str, ttl: int, counts: Mapping[str, int]) -> None:
    """Adds `counts` to the counters at `key`, whose type is `kind` (hash or zset), and sets its TTL in seconds."""
    await store.run_script(_INCREMENT_COUNTERS, [key], kind, ttl, *flatten(counts))


async def set_entry_idle(
    store: Store, stream: str, *, group: str, consumer: str, idle: int, entries: Sequence[str]
) -> int:
    """Sets the idle time (ms) of the entries that are pending for the consumer, and returns their number."""
    return int(await store.run_script(_SET_ENTRY_IDLE, [stream], group, consumer, idle, *entries))
