"""Runs the script that copies keys of Redis."""

from collections.abc import Sequence

import msgspec

from gateway.redis.client import Script, Store

_COPY_KEYS = Script("backup/copy_keys")


class KeyCopy(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a key: names and values of a hash, members and scores of a zset, otherwise values."""

    key: str
    kind: str  # its type in Redis
    expires: int  # ms since the epoch, or -1
    values: list[str]


async def copy_keys(store: Store, keys: Sequence[str]) -> list[KeyCopy]:
    """Copies the keys, which are all in one slot, in one step. Leaves out those that do not exist, and streams.

    Raises BackboneUnavailable.
    """
    reply = await store.run_script(_COPY_KEYS, keys)
    copies = (KeyCopy(key, kind, expires, values) for key, (kind, expires, values) in zip(keys, reply, strict=True))
    return [copy for copy in copies if copy.values]
