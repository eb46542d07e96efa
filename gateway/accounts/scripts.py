"""The scripts of accounts, their API keys and apps."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from gateway.keys import (
    REGISTRATIONS_KEY,
    REGISTRATIONS_MOVING_KEY,
    api_keys_used_key,
    key_lists,
    spend_key,
    trail_actor_key,
    trail_counts_key,
    trail_last_key,
    trail_stream_key,
)
from gateway.redis.client import Script, Store, flatten

_COUNT_REGISTRATION = Script("accounts/count_registration")
_ADD_KEY = Script("accounts/add_key", durable=True)
_REVOKE_KEY = Script("accounts/revoke_key", durable=True)
_MOVE_SCOPED_KEYS = Script("accounts/move_scoped_keys")
_RECORD_KEY_USES = Script("accounts/record_key_uses")
_FORGET_APP = Script("accounts/forget_app")
_ADD_TRAIL_ENTRY = Script("accounts/add_trail_entry")
_TAKE_BACK_TRAIL_ENTRY = Script("accounts/take_back_trail_entry")


class RegistrationReply(msgspec.Struct, frozen=True):
    verdict: Literal["counted", "full", "anonymous full"]
    resets_in: int  # seconds until 00:00 UTC


async def count_registration(store: Store, per_day: int, anonymous: int | None = None) -> RegistrationReply:
    """Counts a registration if the day's limit allows one more.

    `anonymous` is the limit of registrations without a sign-in; None for one with a sign-in.
    """
    script_keys = [REGISTRATIONS_KEY, REGISTRATIONS_MOVING_KEY]
    args = (per_day, "" if anonymous is None else anonymous)
    verdict, resets_in = await store.run_script(_COUNT_REGISTRATION, script_keys, *args)
    return RegistrationReply(verdict, int(resets_in))


async def add_key(store: Store, account: str, key: str, record: str, limit: int, *, full: bool) -> bool:
    """Adds an API key (its id) to the account, or leaves it there; False if the account has `limit` others."""
    lists = key_lists(account)
    return bool(await store.run_script(_ADD_KEY, lists if full else lists[::-1], key, record, limit))


async def move_scoped_keys(store: Store, account: str) -> int:
    """Moves the account's scoped API keys to the list of their own. Returns their number."""
    return int(await store.run_script(_MOVE_SCOPED_KEYS, key_lists(account)))


class Revocation(msgspec.Struct, frozen=True):
    verdict: Literal["revoked", "last", "unknown"]
    record: str  # of the revoked key; otherwise ''


async def revoke_key(store: Store, account: str, key: str, *, even_last: bool = False) -> Revocation:
    """Removes an API key (its id) from the account, unless it is the only full one and `even_last` is not set."""
    script_keys = [*key_lists(account), api_keys_used_key(account)]
    return Revocation(*await store.run_script(_REVOKE_KEY, script_keys, key, "1" if even_last else ""))


async def record_key_uses(store: Store, account: str, used: Sequence[str]) -> int:
    """Sets the last use of these API keys (ids) to now; returns the number of them that the account has."""
    script_keys = [*key_lists(account), api_keys_used_key(account)]
    return int(await store.run_script(_RECORD_KEY_USES, script_keys, *used))


async def forget_app(store: Store, account: str, app: str, day: str) -> bool:
    """Adds a deleted app's spend of the day to that of all deleted apps, if nothing is reserved for it."""
    return bool(await store.run_script(_FORGET_APP, [spend_key(account, day)], app))


class TrailPlace(NamedTuple):
    """Where an account's trail has the entries of one actor."""

    account: str
    part: str
    actor: str  # hash

    @property
    def keys(self) -> list[str]:
        account, part = self.account, self.part
        stream, counts = trail_stream_key(account, part), trail_counts_key(account, part)
        return [stream, counts, trail_actor_key(account, part, self.actor)]


class TrailLimits(NamedTuple):
    entries: int  # of one part
    share: int  # of one actor, in one part
    kept: int  # seconds
    counted: int  # seconds in which equal changes are counted with one entry


async def add_trail_entry(
    store: Store, place: TrailPlace, change: str, limits: TrailLimits, fields: Mapping[str, str]
) -> str:
    """Adds an entry, or counts it with that of an equal change. `change` is a hash. Returns the id of the entry."""
    script_keys = [*place.keys, trail_last_key(place.account, place.part, change)]
    return str(await store.run_script(_ADD_TRAIL_ENTRY, script_keys, *limits, *flatten(dict(fields))))


async def take_back_trail_entry(store: Store, place: TrailPlace, entry: str) -> int:
    """Takes back a change that was refused. Returns the number of equal changes that are left with the entry."""
    return int(await store.run_script(_TAKE_BACK_TRAIL_ENTRY, place.keys, entry))
