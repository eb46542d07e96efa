"""This process's copies of records, such as those of accounts and apps.

A copy is used only while the subscription to changes is alive, and is dropped when its record changes, so every process
sees a change within a second. When the subscription is lost, or silent for a second, each look-up reads Redis until the
subscription is back. Only while a record's node of a cluster is away, its copy is used for another minute: nobody can
change the record meanwhile, and an app whose account is on another node is still served.

Other parts of the process subscribe to records of their own. A record that cannot be read, because its node of a
cluster is away, is read again until it can be, and affects no other record.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from gateway.errors import BackboneUnavailable
from gateway.loops import every, until_set
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change, change_record
from gateway.redis.listener import Listener
from gateway.redis.scripts import CHANGES_CHANNEL

MAX_COPIES = 20_000
MAX_AGE_SECONDS = 300.0  # after which a copy is read again, in case a cluster lost a message
STALE_SECONDS = 60.0  # for which a copy is used while its record cannot be read
RETRY_SECONDS = 1.0  # between two attempts to read such a record
REREAD_SECONDS = 30.0  # after which subscribers read their records again, in case a cluster lost a message
RELOAD_SECONDS = 0.3  # before a subscriber reads again a record that could not be read

R = TypeVar("R")
T = TypeVar("T")


class _Copy(msgspec.Struct):
    record: Any
    current_until: float  # monotonic seconds
    usable_until: float  # if the record cannot be read
    away: bool = False  # the record could not be read


class _Subscriber(msgspec.Struct):
    reload: Callable[[], Awaitable[None]]
    on_unreadable: Callable[[], None] | None
    current: bool = False  # it has read its record at least once


class RecordCache:
    def __init__(self, store: Store, *, max_copies: int = MAX_COPIES, reread_seconds: float = REREAD_SECONDS) -> None:
        self._store, self._max_copies, self._reread_seconds = store, max_copies, reread_seconds
        self.is_current = False  # the subscription is alive and all subscribers have read their records
        self._copies: dict[str, _Copy] = {}
        self.changes = 0  # how often a copy may have become outdated
        self._subscribed = False
        self._subscribers: dict[str, _Subscriber] = {}
        self._outdated: dict[str, bool] = {}  # subscribers' records to read; True: because a change was announced
        self._reload_wanted = asyncio.Event()

    async def read(self, key: str, kind: type[R]) -> R | None:
        """Returns the record, from the copy if it is current. Raises BackboneUnavailable."""
        copy, now = self._copies.get(key), time.monotonic()
        record: R
        if copy is not None and copy.current_until > now:
            record = copy.record
            return record
        if copy is not None and copy.away and copy.usable_until > now:
            copy.current_until = now + RETRY_SECONDS  # one request reads, and the others do not wait for it
        before = self.changes
        try:
            text = await self._store.get(key)
        except BackboneUnavailable:
            if copy is None or copy is not self._copies.get(key) or copy.usable_until <= now or not self._store.cluster:
                raise
            copy.away, copy.current_until = True, now + RETRY_SECONDS
            record = copy.record
            return record
        if text is None:
            self._copies.pop(key, None)
            return None  # not cached: names that do not exist must not push out those that do
        record = msgspec.json.decode(text, type=kind)
        # A change announced during the read may concern the record that was read.
        if before == self.changes:
            self._copies.pop(key, None)
            while len(self._copies) >= self._max_copies:
                del self._copies[next(iter(self._copies))]
            age = MAX_AGE_SECONDS if self.is_current else 0.0
            self._copies[key] = _Copy(record, now + age, now + age + STALE_SECONDS)
        return record

    def find(self, key: str, kind: type[R]) -> R | None:
        """Returns the record from its copy, if that is current. Does not read Redis."""
        copy = self._copies.get(key)
        record: R | None = copy.record if copy is not None and copy.current_until > time.monotonic() else None
        return record

    def forget(self, key: str) -> None:
        """Drops a copy. A process that changes a record calls this, and does not wait for its own message."""
        self.changes += 1
        self._copies.pop(key, None)

    async def change(self, key: str, compute: Callable[[str], Awaitable[Change[T]]], subject: str) -> T:
        """Changes a record with `change_record`, and drops its copy."""
        result = await change_record(self._store, key, compute, subject=subject)
        self.forget(key)
        return result

    def subscribe(
        self, key: str, reload: Callable[[], Awaitable[None]], on_unreadable: Callable[[], None] | None = None
    ) -> None:
        """Runs `reload` when the record changes, and each time the subscription begins.

        Runs `on_unreadable` when a change was announced and the record cannot be read.
        """
        self._subscribers[key] = _Subscriber(reload, on_unreadable)

    @property
    def is_loaded(self) -> bool:
        """Returns whether all subscribers have read their records, at least once."""
        return all(each.current for each in self._subscribers.values())

    # -- the subscription ------------------------------------------------------------------------------------

    async def follow_changes(self) -> None:
        """Runs as long as the process."""
        listener = Listener(
            self._store,
            CHANGES_CHANNEL,
            on_subscribe=self._catch_up,
            on_message=self._apply_change,
            on_loss=self._expire_copies,
            loss_event="registry.lost",
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(listener.run())
            group.create_task(every(0.0, self._reload_outdated))

    def _catch_up(self) -> None:
        # A record that was read before may have changed without an announcement to this process.
        self.changes += 1
        self._subscribed = True
        self._outdated = dict.fromkeys(self._subscribers, False) | self._outdated
        self._update_current()
        self._reload_wanted.set()

    def _apply_change(self, _: str, key: str) -> None:
        self.forget(key)
        if key in self._subscribers:
            self._outdated[key] = True
            self._reload_wanted.set()

    def _expire_copies(self) -> None:
        self.is_current = self._subscribed = False
        self.changes += 1
        now = time.monotonic()
        for copy in self._copies.values():
            if copy.current_until > now and not copy.away:
                copy.current_until, copy.usable_until = 0.0, now + STALE_SECONDS

    def _update_current(self) -> None:
        self.is_current = self._subscribed and self.is_loaded

    async def _reload_outdated(self) -> None:
        """Waits until records are to be read, and reads them."""
        if not await until_set(self._reload_wanted, self._reread_seconds):
            self._outdated = dict.fromkeys(self._subscribers, False) | self._outdated
        self._reload_wanted.clear()
        failed = False
        for key, announced in list(self._outdated.items()):
            del self._outdated[key]
            failed |= not await self._reload(key, announced)
        if failed:  # a record that has changed again meanwhile is read at once
            await asyncio.sleep(RELOAD_SECONDS)
            self._reload_wanted.set()

    async def _reload(self, key: str, announced: bool) -> bool:
        """Returns whether the record was read."""
        subscriber = self._subscribers[key]
        try:
            await subscriber.reload()
        except BackboneUnavailable:
            self._outdated.setdefault(key, announced)
            if announced and subscriber.on_unreadable is not None:
                subscriber.on_unreadable()
            return False
        subscriber.current = True
        self._update_current()
        return True
