"""Queues in Redis Streams: one stream per partition, one consumer group per stream, any number of workers.

- An entry is pending for the worker that read it until its outcome is written. Then it is acknowledged and removed.
- A worker's name is stable: its host name, and the lowest number that no other worker on the host uses. A heartbeat
  that expires reserves the name. The next worker with that name takes over its pending entries. A worker whose
  heartbeat may have expired starts no work until it has confirmed that it still owns the name (`confirm_name`).
- Well before `claim_idle` has passed, a worker resets the idle time of the entries that it has in memory. An entry that
  was idle for longer belongs to a dead worker, and any other worker claims it.
- Blocking reads use one connection per partition. So a read does not delay claims, or other partitions, which may be on
  other nodes of a cluster.
- While Redis is unavailable, every task retries without limit. Once Redis is back, no worker claims entries until the
  others have had time to renew the entries that they still hold.
- An entry that can't be processed must not end one worker after the other. If the handler refuses it, it becomes a dead
  letter at once. If processing it fails because of a bug, it becomes a dead letter after the third attempt
  (`fail_entry`).

The handler controls the load: the consumer awaits `wait_for_space` before each read.
"""

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
from gateway.keys import HEARTBEAT_SECONDS, PARTITION_TAGS, partition_tag, stream_key, worker_key
from gateway.loops import batched, pauses
from gateway.redis.client import COMMAND_SECONDS, Store
from gateway.redis.errors import map_redis_errors
from gateway.redis.scripts import set_entry_idle
from workers.heartbeat import note_start, worker_name

logger = structlog.get_logger()

BLOCK_MS = 2_000  # together with COMMAND_SECONDS, this bounds the wait for a server that has vanished
BATCH_ENTRIES = 100  # per read
RENEWAL_SECONDS = 5.0  # between heartbeats
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 0.5  # before a retry
CLAIM_PAUSE_SECONDS = 1.0  # between searches for entries of dead workers
PENDING_ENTRIES = 100_000  # at most, that a worker gives back when it stops
PROCESSING_ATTEMPTS = 3  # before an entry whose processing fails becomes a dead letter
FORGET_CONSUMER_MS = 86_400_000  # idle time after which a consumer without pending entries is removed
NAMES_PER_HOST = 1_000
OUTAGE_SECONDS = 5.0  # without a fault, after which the next fault is a new outage and is logged
REASON_CHARACTERS = 200  # of a dead letter


class Entry(NamedTuple):
    tag: str  # the partition
    id: str  # in the stream
    fields: dict[str, str]


def require_partition(entry: Entry) -> None:
    """Raises ValueError or KeyError unless the entry's account belongs to its partition."""
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
        *,
        renewal_seconds: float = RENEWAL_SECONDS,
        names_per_host: int = NAMES_PER_HOST,
        forget_consumer_ms: int = FORGET_CONSUMER_MS,
    ) -> None:
        """`handle` accepts an entry and returns at once. The handler calls `forget_entry` once the outcome is written.

        If `handle` cannot process an entry, it raises an exception and keeps nothing of the entry.
        """
        self._store, self._stream, self.group = store, stream, group
        self._idle = int(claim_idle * 1000)
        self._handle, self._wait_for_space = handle, wait_for_space
        self._renewal_seconds, self._names_per_host = renewal_seconds, names_per_host
        self._forget_consumer_ms = forget_consumer_ms
        self._blocking = store.blocking_client()
        self.name = ""
        self._token = secrets.token_hex(8)  # in the heartbeat: distinguishes workers with the same name
        self._name_valid_until = 0.0
        self._name_confirmed = asyncio.Event()
        self._last_fault = float("-inf")  # monotonic seconds, of all partitions
        self._held: dict[str, set[str]] = {tag: set() for tag in PARTITION_TAGS}
        self._positions: dict[str, str] = {}  # partition → where the next read starts; ">" once no old entry is left

    def key(self, tag: str) -> str:
        return stream_key(tag, self._stream)

    # -- lifecycle -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs until canceled. The handler then finishes or drops its entries, and calls `release_entries`."""
        try:
            await self._retry_until_done(self._make_groups)
            await self._retry_until_done(self._reserve_name)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._retry_until_done(self._note_start))
                group.create_task(self._retry_until_done(self._send_heartbeat, every=self._renewal_seconds))
                # One task per partition: the cluster node of one partition may be unavailable while the others work.
                for tag in PARTITION_TAGS:
                    group.create_task(self._retry_until_done(self._read_entries, tag))
                    group.create_task(self._retry_until_done(self._claim_idle_entries, tag))
                    group.create_task(self._retry_until_done(self._renew_entries, tag, every=self._idle / 3000))
        finally:
            await self._blocking.aclose()

    async def release_entries(self) -> None:
        """Lets other workers claim the unfinished entries at once. Call this after a drain."""
        for tag in PARTITION_TAGS:
            # Not only the entries in memory: Redis may have processed a read that was then canceled.
            pending = await self._store.client.xpending_range(
                self.key(tag), self.group, "-", "+", PENDING_ENTRIES, self.name
            )
            await self._set_idle(tag, [entry["message_id"] for entry in pending], self._idle * 10)
        if time.monotonic() < self._name_valid_until:
            await self._store.client.delete(self._heartbeat_key())

    @property
    def held_count(self) -> int:
        """The number of entries in memory."""
        return sum(map(len, self._held.values()))

    def forget_entry(self, entry: Entry) -> None:
        self._held[entry.tag].discard(entry.id)

    async def acknowledge_entry(self, entry: Entry) -> None:
        """Removes an entry whose outcome is written. Raises BackboneUnavailable."""
        await self._store.client.xack(self.key(entry.tag), self.group, entry.id)
        await self._store.client.xdel(self.key(entry.tag), entry.id)

    async def claim_entry(self, tag: str, entry_id: str) -> Entry | None:
        """Takes over an entry from another worker. Returns None if it is finished, or already held here.

        Raises BackboneUnavailable.
        """
        claimed = await self._store.client.xclaim(self.key(tag), self.group, self.name, 0, [entry_id])
        for found, fields in claimed:
            if fields and found not in self._held[tag]:
                self._held[tag].add(found)
                return Entry(tag, found, fields)
        return None

    async def _retry_until_done(
        self, work: Callable[..., Coroutine[Any, Any, bool]], *args: str, every: float = 0
    ) -> None:
        """Repeats the work until it returns True, with `every` seconds in between, or growing pauses if Redis fails."""
        growing = pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            end_if_canceled()
            try:
                if await work(*args):
                    return
                growing = pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
                end_if_canceled()
                await asyncio.sleep(every)
            except BackboneUnavailable as error:
                fault = error.__cause__
                if not await self._make_lost_groups(fault):
                    self._log_fault(fault)
                    await asyncio.sleep(next(growing))

    def _log_fault(self, fault: BaseException | None) -> None:
        """Logs one line per outage, not one per partition."""
        now = time.monotonic()
        if now - self._last_fault > OUTAGE_SECONDS:
            logger.warning("stream.waiting", stream=self._stream, error=f"{type(fault).__name__}: {fault}")
        self._last_fault = now

    async def _make_lost_groups(self, fault: BaseException | None) -> bool:
        """Creates the consumer groups again if the fault says that Redis has lost them."""
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
        for number in range(1, self._names_per_host):
            self.name = worker_name(number)
            if await self._renew_name(nx=True):
                self._positions.clear()
                logger.info("stream.joined", stream=self._stream, name=self.name)
                return True
        await asyncio.sleep(self._renewal_seconds)
        return False

    async def _note_start(self) -> bool:
        await note_start(self._store, self.group, self.name, self._token)
        return True

    async def _renew_name(self, *, nx: bool = False) -> bool:
        """Reserves or renews the name. Returns False, and changes nothing, if another worker has the name."""
        began, key = time.monotonic(), self._heartbeat_key()
        owner = await self._store.client.set(key, self._token, nx=nx, get=True, ex=HEARTBEAT_SECONDS)
        if owner in (None, self._token):
            self._name_valid_until = began + HEARTBEAT_SECONDS - COMMAND_SECONDS
            self._name_confirmed.set()
            return True
        if not nx:
            await self._store.client.set(key, owner, ex=HEARTBEAT_SECONDS)
        return False

    async def _send_heartbeat(self) -> bool:
        if not await self._renew_name():
            # Redis was unreachable for so long that another worker has taken the name and its pending entries.
            logger.warning("stream.name_lost", stream=self._stream, name=self.name)
            self._name_valid_until = 0.0
            await self._retry_until_done(self._reserve_name)
        # Redis before 7.2 lists a consumer only after its first entry. This command lists it at once, for operators.
        await self._store.client.xgroup_createconsumer(self.key(PARTITION_TAGS[0]), self.group, self.name)
        return False

    async def confirm_name(self) -> None:
        """Waits while another worker may have this name and its pending entries, because both would process them."""
        while time.monotonic() > self._name_valid_until:
            self._name_confirmed.clear()
            await self._name_confirmed.wait()

    # -- entries ---------------------------------------------------------------------------------------------

    async def _read_entries(self, tag: str) -> bool:
        await self._wait_for_space()
        # The worker's own pending entries come first: entries of the previous worker with this name, and entries of a
        # read whose reply was lost.
        last = self._positions.pop(tag, "0")
        entries = await self._read_after(tag, last)
        await self._accept_entries(tag, entries)
        self._positions[tag] = entries[-1][0] if entries and last != ">" else ">"
        return False

    async def _read_after(self, tag: str, last: str) -> list[tuple[str, dict[str, str] | None]]:
        block = BLOCK_MS if last == ">" else None
        # If the server vanishes without closing the connection, the read would wait forever.
        with map_redis_errors():
            async with asyncio.timeout(BLOCK_MS / 1000 + COMMAND_SECONDS):
                answer = await self._blocking.xreadgroup(
                    self.group, self.name, {self.key(tag): last}, count=BATCH_ENTRIES, block=block
                )
        return answer[0][1] if answer else []

    async def _accept_entries(self, tag: str, entries: list[tuple[str, dict[str, str] | None]]) -> None:
        held = self._held[tag]
        for entry_id, fields in entries:
            if fields and entry_id not in held:
                entry = Entry(tag, entry_id, fields)
                held.add(entry_id)
                try:
                    self._handle(entry)
                except Exception as error:
                    self.forget_entry(entry)
                    await self._dead_letter(entry, error)

    async def fail_entry(self, entry: Entry, error: Exception, event: QueuedEvent | None = None) -> bool:
        """Reports that processing the entry failed because of a bug. Returns True if the entry became a dead letter.

        Otherwise it stays pending, and the worker that claims it tries again. If the entry is dead, the account's log
        records its `event` as failed. Raises BackboneUnavailable.
        """
        pending = await self._store.client.xpending_range(self.key(entry.tag), self.group, entry.id, entry.id, 1)
        if pending and pending[0]["times_delivered"] >= PROCESSING_ATTEMPTS:
            return await self._dead_letter(entry, error, event)
        return False

    async def _dead_letter(self, entry: Entry, error: Exception, event: QueuedEvent | None = None) -> bool:
        reason = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]
        logger.error("stream.dead_letter", stream=self._stream, entry=entry.id, reason=reason)
        return await scripts.dead_letter(
            self._store, entry.tag, self._stream, entry.fields, event, group=self.group, entry=entry.id, reason=reason
        )

    async def _renew_entries(self, tag: str) -> bool:
        """Resets the idle time of the entries in memory, so that no other worker claims them."""
        await self._set_idle(tag, list(self._held[tag]), 0)
        return False

    async def _set_idle(self, tag: str, ids: list[str], idle: int) -> None:
        for batch in batched(ids, BATCH_ENTRIES):
            await set_entry_idle(
                self._store, self.key(tag), group=self.group, consumer=self.name, idle=idle, entries=batch
            )

    async def _claim_idle_entries(self, tag: str) -> bool:
        """Claims entries of dead workers until Redis fails.

        This starts with a pause: after an outage of Redis, the entries of live workers seem as idle as those of dead
        workers until they are renewed.
        """
        await self._remove_idle_consumers(tag)
        end_if_canceled()
        await asyncio.sleep(self._idle / 3000)
        while True:
            end_if_canceled()
            cursor = ""
            while cursor != "0-0":  # one step scans a thousand entries, and live workers may hold all of them
                await self._wait_for_space()
                cursor, entries, *_ = await self._store.client.xautoclaim(
                    self.key(tag), self.group, self.name, self._idle, cursor or "0-0", count=BATCH_ENTRIES
                )
                if entries:
                    logger.warning("stream.claimed", stream=self._stream, entries=len(entries))
                await self._accept_entries(tag, entries)
            await asyncio.sleep(CLAIM_PAUSE_SECONDS)

    async def _remove_idle_consumers(self, tag: str) -> None:
        for consumer in await self._store.client.xinfo_consumers(self.key(tag), self.group):
            if consumer["pending"] == 0 and consumer["idle"] > self._forget_consumer_ms:
                await self._store.client.xgroup_delconsumer(self.key(tag), self.group, consumer["name"])
