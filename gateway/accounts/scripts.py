"""The scripts of accounts, their API keys and apps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gateway.accounts.keys import REGISTRATIONS_KEY, REGISTRATIONS_MOVING_KEY, api_keys_key, api_keys_used_key
from gateway.inference.keys import spend_key
from gateway.redis.client import Script, Store

_REGISTER = Script("accounts/register")
_ADD_KEY = Script("accounts/add_key", durable=True)
_REVOKE_KEY = Script("accounts/revoke_key", durable=True)
_USE_KEYS = Script("accounts/use_keys")
_FORGET_APP = Script("accounts/forget_app")


class Registration(msgspec.Struct, frozen=True):
    accepted: bool
    resets_in: int  # seconds until 00:00 UTC


async def register(store: Store, per_day: int) -> Registration:
    """Counts a registration if today has room for one more."""
    accepted, resets_in = await store.run_script(_REGISTER, [REGISTRATIONS_KEY, REGISTRATIONS_MOVING_KEY], per_day)
    return Registration(bool(accepted), int(resets_in))


async def add_key(store: Store, account: str, key: str, record: str, limit: int) -> bool:
    """Adds an API key (its id) to the account's, or leaves it there; False if the account has `limit` others."""
    return bool(await store.run_script(_ADD_KEY, [api_keys_key(account)], key, record, limit))


class Revocation(msgspec.Struct, frozen=True):
    verdict: Literal["revoked", "last", "unknown"]
    record: str  # of the key that was revoked; otherwise ''


async def revoke_key(store: Store, account: str, key: str) -> Revocation:
    """Removes an API key (its id) from the account's, unless it is the only one."""
    script_keys = [api_keys_key(account), api_keys_used_key(account)]
    return Revocation(*await store.run_script(_REVOKE_KEY, script_keys, key))


async def use_keys(store: Store, account: str, used: Sequence[str]) -> int:
    """Sets the last use of those API keys (ids) that the account has to now; returns how many it has."""
    script_keys = [api_keys_key(account), api_keys_used_key(account)]
    return int(await store.run_script(_USE_KEYS, script_keys, *used))


async def forget_app(store: Store, account: str, app: str, day: str) -> bool:
    """Adds what a deleted app spent on the day to one number for all of them, if nothing is reserved for it."""
    return bool(await store.run_script(_FORGET_APP, [spend_key(account, day)], app))
