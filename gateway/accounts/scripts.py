"""The scripts of accounts, their API keys and apps."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from gateway.keys import REGISTRATIONS_KEY, REGISTRATIONS_MOVING_KEY, api_keys_key, api_keys_used_key, spend_key
from gateway.redis.client import Script, Store

_COUNT_REGISTRATION = Script("accounts/count_registration")
_ADD_KEY = Script("accounts/add_key", durable=True)
_REVOKE_KEY = Script("accounts/revoke_key", durable=True)
_RECORD_KEY_USES = Script("accounts/record_key_uses")
_FORGET_APP = Script("accounts/forget_app")


class RegistrationReply(msgspec.Struct, frozen=True):
    accepted: bool
    resets_in: int  # seconds until 00:00 UTC


async def count_registration(store: Store, per_day: int) -> RegistrationReply:
    """Counts a registration if the day's limit allows one more."""
    script_keys = [REGISTRATIONS_KEY, REGISTRATIONS_MOVING_KEY]
    accepted, resets_in = await store.run_script(_COUNT_REGISTRATION, script_keys, per_day)
    return RegistrationReply(bool(accepted), int(resets_in))


async def add_key(store: Store, account: str, key: str, record: str, limit: int) -> bool:
    """Adds an API key (its id) to the account, or leaves it there; False if the account has `limit` others."""
    return bool(await store.run_script(_ADD_KEY, [api_keys_key(account)], key, record, limit))


class Revocation(msgspec.Struct, frozen=True):
    verdict: Literal["revoked", "last", "unknown"]
    record: str  # of the revoked key; otherwise ''


async def revoke_key(store: Store, account: str, key: str, *, even_last: bool = False) -> Revocation:
    """Removes an API key (its id) from the account, unless it is the only full one and `even_last` is not set."""
    script_keys = [api_keys_key(account), api_keys_used_key(account)]
    return Revocation(*await store.run_script(_REVOKE_KEY, script_keys, key, "1" if even_last else ""))


async def record_key_uses(store: Store, account: str, used: Sequence[str]) -> int:
    """Sets the last use of these API keys (ids) to now; returns the number of them that the account has."""
    script_keys = [api_keys_key(account), api_keys_used_key(account)]
    return int(await store.run_script(_RECORD_KEY_USES, script_keys, *used))


async def forget_app(store: Store, account: str, app: str, day: str) -> bool:
    """Adds a deleted app's spend of the day to that of all deleted apps, if nothing is reserved for it."""
    return bool(await store.run_script(_FORGET_APP, [spend_key(account, day)], app))
