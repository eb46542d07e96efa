"""Queues in Redis Streams: one stream per partition, one consumer group per stream, any number of workers.

- An entry is pending for the worker that read it until its outcome is written. Then it is acknowledged and removed.
- A worker's name is stable: the lowest number on its host that no other worker has. A heartbeat that expires reserves
  the name. The next worker with that name takes over its pending entries. A worker whose heartbeat may have expired
  starts nothing until it knows that the name is still its own (`confirm_name`).
- Well before `claim_idle` is over, a worker restarts the idle time of the entries it has in memory. An entry that was
  idle for longer belongs to a worker that died, and any other worker claims it.
- Blocking reads use one connection per partition, so that a read delays neither another partition (which may be on
  another node of a cluster) nor the claims.
- While Redis is away, everything waits and tries again, without end. Once it is back, no worker claims entries until
  the others had time to show which ones they still hold.
- An entry that can't be processed would otherwise end one worker after the other. If the handler refuses it, it becomes
  a dead letter at once; if processing it fails by a fault of ours, after the third attempt (`fail`).

The handler controls the load: the consumer awaits `wait_for_space` before each read.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import structlog
from redis.exceptions import ResponseError

from gateway.cancellation import end_if_canceled
from gateway.errors import BackboneRefused, BackboneUnavailable
from gateway.events import scripts
from gateway.events.records import QueuedEvent
from gateway.operations.keys import HEARTBEAT_SECONDS, worker_key
from gateway.redis.client import ATTEMPT, Store
from gateway.redis.partitions import PARTITION_TAGS, partition_tag, stream_key
from gateway.redis.scripts import set_entry_idle
from workers.heartbeat import worker_name

logger = structlog.get_logger()

BLOCK = 2_000  # ms; with ATTEMPT it bounds how long a read waits for a server that has vanished
BATCH = 100  # entries per read
HEARTBEAT = 5.0  # seconds between heartbeats
FIRST_PAUSE = 0.1  # seconds
CLAIM_INTERVAL = 1.0  # seconds between searches for entries of dead workers
PENDING = 100_000  # entries that a worker gives back when it stops
ATTEMPTS = 3  # at an entry whose processing fails by a fault of ours
FORGET_AFTER = 86_400_000  # ms of idleness after which a consumer without pending entries is removed
NAMES = 1_000  # per host
OUTAGE = 5.0  # seconds without a fault after which the next one is a new outage, and logged
REASON_LENGTH = 200  # characters, of a dead letter


class Entry(NamedTuple):
    tag: str  # its partition
    id: str  # in the stream
    fields: dict[str, str]


def require_partition(entry: Entry) -> None:
    """Raises ValueError, or KeyError, unless the entry's account belongs to its partition."""
    if partition_tag(entry.fields["account"]) != entry.tag:
        raise ValueError("the account belongs to another partition")


class Consumer:
    def __init__(
        self,
        store: Store,
        stream: str,
        group: str,
        claim_idle: float,
        handle: Callable[[Entry], None],
        wait_for_space: Callable[[], Awaitable[None]],
    ) -> None:
        """`handle` takes an entry into memory and returns at once; `done` is called once the outcome is written.

        `handle` raises an exception, and keeps nothing, when the entry is not one that it can process.
        """
        self._store, self._stream, self.group = store, stream, group
        self._idle = int(claim_idle * 1000)
        self._handle, self._wait_for_space = handle, wait_for_space
        self._blocking = store.blocking_client()
        self.name = ""
        self._token = secrets.token_hex(8)  # in the heartbeat: distinguishes workers of the same name
        self._name_valid_until = 0.0
        self._name_confirmed = asyncio.Event()
        self._last_fault = float("-inf")  # when it was, of all partitions
        self._held: dict[str, set[str]] = {tag: set() for tag in PARTITION_TAGS}
        self._positions: dict[str, str] = {}  # partition → where to read on; ">" once no old entry is left

    def key(self, tag: str) -> str:
        return stream_key(tag, self._stream)

    # -- lifecycle -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until it is canceled. The handler then finishes or drops what it has in memory, and calls `release`."""
        try:
            await self._until_done(self._make_groups)
            await self._until_done(self._reserve_name)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._repeat(HEARTBEAT, self._send_heartbeat))
                # One task per partition: the cluster node of one partition may be away while the others are not.
                for tag in PARTITION_TAGS:
                    group.create_task(self._until_done(self._read, tag))
                    group.create_task(self._until_done(self._claim, tag))
                    group.create_task(self._repeat(self._idle / 3000, self._renew_entries, tag))
        finally:
            await self._blocking.aclose()

    async def release(self) -> None:
        """Lets other workers claim the unfinished entries at once. Call it after a drain."""
        for tag in PARTITION_TAGS:
            # Not only the entries in memory: a canceled read may already have been answered.
            pending = await self._store.client.xpending_range(self.key(tag), self.group, "-", "+", PENDING, self.name)
            await self._set_idle(tag, [entry["message_id"] for entry in pending], self._idle * 10)
        if time.monotonic() < self._name_valid_until:
            await self._store.client.delete(self._heartbeat_key())

    @property
    def holding(self) -> int:
        """The number of entries in memory."""
        return sum(map(len, self._held.values()))

    def done(self, entry: Entry) -> None:
        self._held[entry.tag].discard(entry.id)

    async def claim(self, tag: str, entry_id: str) -> Entry | None:
        """Takes an entry from the worker that holds it, and holds it; None if it is finished or held here already.

        Raises BackboneUnavailable.
        """
        claimed = await self._store.client.xclaim(self.key(tag), self.group, self.name, 0, [entry_id])
        for found, fields in claimed:
            if fields and found not in self._held[tag]:
                self._held[tag].add(found)
                return Entry(tag, found, fields)
        return None

    async def _until_done(self, work: Callable[..., Coroutine[Any, Any, bool]], *args: str) -> None:
        """Repeats the work until it returns True. A failure of Redis costs a growing pause, never the worker."""
        pause = FIRST_PAUSE
        while True:
            end_if_canceled()
            try:
                if await work(*args):
                    return
                pause = FIRST_PAUSE
            except BackboneUnavailable as error:
                fault = error.__cause__
                if not await self._make_lost_groups(fault):
                    self._log_fault(fault)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, 2.0)

    def _log_fault(self, fault: BaseException | None) -> None:
        """One line per outage, not one for each partition."""
        now = time.monotonic()
        if now - self._last_fault > OUTAGE:
            logger.warning("stream.waiting", stream=self._stream, error=f"{type(fault).__name__}: {fault}")
        self._last_fault = now

    async def _repeat(self, seconds: float, work: Callable[..., Coroutine[Any, Any, None]], *args: str) -> None:
        while True:
            end_if_canceled()
            try:
                await work(*args)
                end_if_canceled()
                await asyncio.sleep(seconds)
            except BackboneUnavailable as error:
                await self._make_lost_groups(error.__cause__)
                await asyncio.sleep(min(seconds, 0.5))

    async def _make_lost_groups(self, fault: BaseException | None) -> bool:
        """Makes the groups again if the fault says that Redis has lost them."""
        if not (isinstance(fault, ResponseError) and str(fault).startswith("NOGROUP")):
            return False
        try:
            return await self._make_groups()
        except BackboneUnavailable:
            return False

    async def _make_groups(self) -> bool:
        for tag in PARTITION_TAGS:
            try:
                await self._store.client.xgroup_create(self.key(tag), self.group, "0", mkstream=True)
            except BackboneRefused as refused:
                if not str(refused.__cause__).startswith("BUSYGROUP"):
                    raise
        return True

    # -- names -----------------------------------------------------------------------------------------------

    def _heartbeat_key(self) -> str:
        return worker_key(self.group, self.name)

    async def _reserve_name(self) -> bool:
        for number in range(1, NAMES):
            self.name = worker_name(number)
            if await self._renew_name(nx=True):
                self._positions.clear()
                logger.info("stream.joined", stream=self._stream, name=self.name)
                return True
        await asyncio.sleep(HEARTBEAT)
        return False

    async def _renew_name(self, *, nx: bool = False) -> bool:
        """Reserves or renews the name. Returns False, and leaves the name as it was, if another worker has it."""
        began, key = time.monotonic(), self._heartbeat_key()
        owner = await self._store.client.set(key, self._token, nx=nx, get=True, ex=HEARTBEAT_SECONDS)
        if owner in (None, self._token):
            self._name_valid_until = began + HEARTBEAT_SECONDS - ATTEMPT
            self._name_confirmed.set()
            return True
        if not nx:
            await self._store.client.set(key, owner, ex=HEARTBEAT_SECONDS)
        return False

    async def _send_heartbeat(self) -> None:
        if not await self._renew_name():
            # Redis was out of reach for so long that another worker took the name, and with it the pending entries.
            logger.warning("stream.name_lost", stream=self._stream, name=self.name)
            self._name_valid_until = 0.0
            await self._until_done(self._reserve_name)
        # Redis before 7.2 lists a consumer only after its first entry, but operators expect to see it at once.
        await self._store.client.xgroup_createconsumer(self.key(PARTITION_TAGS[0]), self.group, self.name)

    async def confirm_name(self) -> None:
        """Waits while another worker may have this name and its pending entries: both would process them."""
        while time.monotonic() > self._name_valid_until:
            self._name_confirmed.clear()
            await self._name_confirmed.wait()

    # -- entries ---------------------------------------------------------------------------------------------

    async def _read(self, tag: str) -> bool:
        await self._wait_for_space()
        # The worker's own pending entries come first: those of the previous worker of this name, and those of a read
        # whose answer was lost.
        last = self._positions.pop(tag, "0")
        entries = await self._read_from(tag, last)
        await self._take(tag, entries)
        self._positions[tag] = entries[-1][0] if entries and last != ">" else ">"
        return False

    async def _read_from(self, tag: str, last: str) -> list[tuple[str, dict[str, str] | None]]:
        block = BLOCK if last == ">" else None
        # If the other end vanishes without closing the connection, the read would wait without end.
        async with asyncio.timeout(BLOCK / 1000 + ATTEMPT):
            answer = await self._blocking.xreadgroup(
                self.group, self.name, {self.key(tag): last}, count=BATCH, block=block
            )
        return answer[0][1] if answer else []

    async def _take(self, tag: str, entries: list[tuple[str, dict[str, str] | None]]) -> None:
        held = self._held[tag]
        for entry_id, fields in entries:
            if fields and entry_id not in held:
                entry = Entry(tag, entry_id, fields)
                held.add(entry_id)
                try:
                    self._handle(entry)
                except Exception as error:
                    self.done(entry)
                    await self._bury(entry, error)

    async def fail(self, entry: Entry, error: Exception, event: QueuedEvent | None = None) -> bool:
        """For an entry whose processing failed by a fault of ours: returns True if it became a dead letter.

        Otherwise it stays pending, and the worker that claims it tries again. The account's log records a dead `event`
        as failed. Raises BackboneUnavailable.
        """
        pending = await self._store.client.xpending_range(self.key(entry.tag), self.group, entry.id, entry.id, 1)
        if pending and pending[0]["times_delivered"] >= ATTEMPTS:
            return await self._bury(entry, error, event)
        return False

    async def _bury(self, entry: Entry, error: Exception, event: QueuedEvent | None = None) -> bool:
        reason = f"{type(error).__name__}: {error}"[:REASON_LENGTH]
        logger.error("stream.dead_letter", stream=self._stream, entry=entry.id, reason=reason)
        return await scripts.dead_letter(
            self._store, entry.tag, self._stream, entry.fields, event, group=self.group, entry=entry.id, reason=reason
        )

    async def _renew_entries(self, tag: str) -> None:
        """Restarts the idle time of the entries in memory, so that no other worker claims them."""
        await self._set_idle(tag, list(self._held[tag]), 0)

    async def _set_idle(self, tag: str, ids: list[str], idle: int) -> None:
        for first in range(0, len(ids), BATCH):
            batch = ids[first : first + BATCH]
            await set_entry_idle(
                self._store, self.key(tag), group=self.group, consumer=self.name, idle=idle, entries=batch
            )

    async def _claim(self, tag: str) -> bool:
        """Runs until Redis fails. It starts with a pause: if Redis was away, entries that living workers hold look as
        idle as those of dead ones, until their workers have renewed them."""
        await self._remove_idle_consumers(tag)
        end_if_canceled()
        await asyncio.sleep(self._idle / 3000)
        while True:
            end_if_canceled()
            cursor = ""
            while cursor != "0-0":  # one step scans a thousand entries, all of which living workers may hold
                await self._wait_for_space()
                cursor, entries, *_ = await self._store.client.xautoclaim(
                    self.key(tag), self.group, self.name, self._idle, cursor or "0-0", count=BATCH
                )
                if entries:
                    logger.warning("stream.claimed", stream=self._stream, entries=len(entries))
                await self._take(tag, entries)
            await asyncio.sleep(CLAIM_INTERVAL)

    async def _remove_idle_consumers(self, tag: str) -> None:
        for consumer in await self._store.client.xinfo_consumers(self.key(tag), self.group):
            if consumer["pending"] == 0 and consumer["idle"] > FORGET_AFTER:
                await self._store.client.xgroup_delconsumer(self.key(tag), self.group, consumer["name"])
