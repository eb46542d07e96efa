"""Lists the suspended apps and accounts, for the hosts that serve apps.

The records of apps and accounts decide what is suspended. The hosts keep no copies of these records, and serve apps
without Redis, so they read the list of each partition instead: a hash of ids, with a version that changes with each
change. A suspension is listed before its record is written, and a resumed app leaves the list after that. So an
interrupted change stays visible in the record, and can be repeated.
"""

import secrets
import time

from gateway.keys import partition_tag, suspended_key
from gateway.redis.client import Store

VERSION = "version"  # the field that changes with each change of a partition's list
APP_MARK = "app:"  # before the id of an app, which may equal another name in the list


async def list_suspended(store: Store, account_id: str, app_id: str = "") -> None:
    """Adds an app to the list, or without `app_id` the account. Raises BackboneUnavailable."""
    tag = partition_tag(account_id)
    fields = {_field(account_id, app_id): str(int(time.time() * 1000)), VERSION: secrets.token_hex(8)}
    await store.client.hset(suspended_key(tag), mapping=fields)
    await store.confirm_writes(tag)


async def unlist_suspended(store: Store, account_id: str, app_id: str = "") -> None:
    """Removes an app from the list, or without `app_id` the account. Raises BackboneUnavailable."""
    tag = partition_tag(account_id)
    key = suspended_key(tag)
    async with store.client.pipeline(transaction=True) as pipe:
        pipe.hdel(key, _field(account_id, app_id))
        pipe.hset(key, VERSION, secrets.token_hex(8))
        await pipe.execute()
    await store.confirm_writes(tag)


def _field(account_id: str, app_id: str) -> str:
    return f"{APP_MARK}{app_id}" if app_id else account_id


class SuspendedList:
    """The suspended apps and accounts, as they were read last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._versions: dict[str, str] = {}  # by tag of the partition
        self._known: dict[str, frozenset[str]] = {}  # by tag of the partition
        self.changes = 0  # number of times that a partition's list was read and differed

    def __contains__(self, owned_app: tuple[str, str]) -> bool:
        """Returns whether an app is suspended, by its account's id and its own."""
        account_id, app_id = owned_app
        known = self._known.get(partition_tag(account_id), frozenset())
        return account_id in known or f"{APP_MARK}{app_id}" in known

    async def read_changes(self, *, everything: bool = False) -> None:
        """Reads the partitions whose version has changed, or all of them. Raises BackboneUnavailable."""
        if everything:
            self._versions.clear()
        async for tag, fields in self._store.read_changed(suspended_key, VERSION, self._versions):
            self.changes += self._known.get(tag, frozenset()) != fields.keys()
            self._known[tag] = frozenset(fields)
