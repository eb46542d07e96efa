"""Functions for the scripts that share apps' key sets among processes."""

from typing import Literal

import msgspec

from gateway.keys import key_set_keys
from gateway.redis.client import Script, Store

_FIND_KEY_SET = Script("inference/find_key_set")
_SHARE_KEY_SET = Script("inference/share_key_set")


class FoundKeySet(msgspec.Struct, frozen=True):
    verdict: Literal["copy", "fetch", "wait"]
    now: int  # Redis's time, in ms
    age: int = 0  # of the copy, in ms
    digest: str = ""
    document: str = ""


async def find_key_set(
    store: Store, account: str, app: str, identity: str, *, oldest: int, held_for: int
) -> FoundKeySet:
    """Finds a shared copy of an app's keys that is at most `oldest` ms old, or decides which process fetches them.

    That process alone fetches for `held_for` ms.
    """
    script_keys = key_set_keys(account, app)
    return FoundKeySet(*await store.run_script(_FIND_KEY_SET, script_keys, identity, oldest, held_for))


async def share_key_set(
    store: Store, account: str, app: str, identity: str, *, at: int, life: int, digest: str, document: str
) -> None:
    """Shares a document of keys that was fetched after Redis's time `at`, for `life` ms; '' lets others fetch."""
    script_keys = key_set_keys(account, app)
    await store.run_script(_SHARE_KEY_SET, script_keys, identity, at, life, digest, document)
