"""Work that waits in Redis Streams: one stream a partition, one consumer group, any number of workers.

- An entry is pending for the worker that read it until its outcome is written; then it is acknowledged and removed.
- A worker's name is stable: it holds the lowest free number of its host, by a heartbeat that expires. What is pending
  for a name is taken up by whoever holds it next. A worker whose heartbeat may have expired begins nothing before it
  knows that the name is still its own: `sure`.
- What a worker has in memory it claims again for itself well before `claim_idle`; what nobody claimed for that long
  belongs to a worker that died, and any other claims it.
- Each partition is read on a connection of its own, so that a blocking read delays neither another partition (which
  may be on another node of a cluster) nor the claims.
- When Redis is away every part of this waits and tries again, for ever. When it is back, nobody claims before the
  living had the time to say what they hold.

The handler decides what to take on: `room` is waited for before each read.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import structlog
from redis.exceptions import ResponseError

from gateway.cancellation import end_if_cancelled
from gateway.errors import BackboneUnavailable
from gateway.store import keys, scripts
from gateway.store.client import ATTEMPT, Store, backbone
from workers.heartbeat import worker_name

logger = structlog.get_logger()

BLOCK = 5_000  # ms
BATCH = 100  # entries of one read
HEARTBEAT = 5.0  # seconds
FIRST_PAUSE = 0.1  # seconds
CLAIM = 1.0  # seconds between looks at what others left
PENDING = 100_000  # entries given back at the end
FORGOTTEN = 86_400_000  # ms after which the name of a worker with nothing pending is removed
NAMES = 1_000  # of one host


class Entry(NamedTuple):
    tag: str  # its partition
    id: str  # in the stream
    fields: dict[str, str]


class Consumer:
    def __init__(
        self,
        store: Store,
        stream: str,
        group: str,
        claim_idle: float,
        handle: Callable[[Entry], None],
        room: Callable[[], Awaitable[None]],
    ) -> None:
        """`handle` takes an entry into memory at once; whoever knows its outcome calls `done`."""
        self._store, self._stream, self.group = store, stream, group
        self._idle = int(claim_idle * 1000)
        self._handle, self._room = handle, room
        self._waiting = store.blocking_client()
        self.name = ""
        self._token = secrets.token_hex(8)  # in the heartbeat: tells this worker from another of the same name
        self._sure_until = 0.0
        self._beaten = asyncio.Event()
        self._held: dict[str, set[str]] = {tag: set() for tag in keys.partition_tags()}
        self._resumed: dict[str, str] = {}  # partition -> where reading goes on; ">" once nothing old is left

    def key(self, tag: str) -> str:
        return keys.stream_key(tag, self._stream)

    # -- from start to end -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled. What is in memory then stays the handler's to finish; see `release`."""
        try:
            await self._for_ever(self._make_groups)
            await self._for_ever(self._take_name)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._every(HEARTBEAT, self._beat))
                # Each by itself: the node of a cluster that holds one partition may be away, and another's not.
                for tag in keys.partition_tags():
                    group.create_task(self._for_ever(self._read, tag))
                    group.create_task(self._for_ever(self._claim, tag))
                    group.create_task(self._every(self._idle / 3000, self._keep, tag))
        finally:
            await self._waiting.aclose()

    async def release(self) -> None:
        """After a drain: what was read and not finished is another worker's at once."""
        for tag in keys.partition_tags():
            # Not what is held: a read that was cancelled may have been answered already.
            pending = await self._store.client.xpending_range(self.key(tag), self.group, "-", "+", PENDING, self.name)
            await self._set_idle(tag, [entry["message_id"] for entry in pending], self._idle * 10)
        if time.monotonic() < self._sure_until:
            await self._store.client.delete(self._heartbeat_key())

    @property
    def holding(self) -> int:
        """Entries in memory."""
        return sum(map(len, self._held.values()))

    def done(self, entry: Entry) -> None:
        self._held[entry.tag].discard(entry.id)

    async def _for_ever(self, work: Callable[..., Coroutine[Any, Any, bool]], *args: str) -> None:
        """Again and again until it gives True; a fault of Redis costs a growing pause, never the worker."""
        pause = FIRST_PAUSE
        while True:
            end_if_cancelled()
            try:
                with backbone():
                    if await work(*args):
                        return
                pause = FIRST_PAUSE
            except BackboneUnavailable as error:
                fault = error.__cause__
                if not await self._make_lost_groups(fault):
                    if pause == FIRST_PAUSE:
                        logger.warning("stream.waiting", stream=self._stream, error=f"{type(fault).__name__}: {fault}")
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, 2.0)

    async def _every(self, seconds: float, work: Callable[..., Coroutine[Any, Any, None]], *args: str) -> None:
        while True:
            end_if_cancelled()
            try:
                with backbone():
                    await work(*args)
                await asyncio.sleep(seconds)
            except BackboneUnavailable as error:
                await self._make_lost_groups(error.__cause__)
                await asyncio.sleep(min(seconds, 0.5))

    async def _make_lost_groups(self, fault: BaseException | None) -> bool:
        """Makes the groups again if the fault says that Redis has lost them."""
        if not (isinstance(fault, ResponseError) and str(fault).startswith("NOGROUP")):
            return False
        try:
            with backbone():
                return await self._make_groups()
        except BackboneUnavailable:
            return False

    async def _make_groups(self) -> bool:
        for tag in keys.partition_tags():
            try:
                await self._store.client.xgroup_create(self.key(tag), self.group, "0", mkstream=True)
            except ResponseError as exists:
                if not str(exists).startswith("BUSYGROUP"):
                    raise
        return True

    # -- names -----------------------------------------------------------------------------------------------

    def _heartbeat_key(self) -> str:
        return keys.worker_key(self.group, self.name)

    async def _take_name(self) -> bool:
        for number in range(1, NAMES):
            self.name = worker_name(number)
            if await self._hold_name(nx=True):
                self._resumed.clear()
                logger.info("stream.joined", stream=self._stream, name=self.name)
                return True
        await asyncio.sleep(HEARTBEAT)
        return False

    async def _hold_name(self, *, nx: bool = False) -> bool:
        """One step, which tells whose the name was; it is given back when it was another's."""
        began, key = time.monotonic(), self._heartbeat_key()
        holder = await self._store.client.set(key, self._token, nx=nx, get=True, ex=keys.HEARTBEAT_SECONDS)
        if holder in (None, self._token):
            self._sure_until = began + keys.HEARTBEAT_SECONDS - ATTEMPT
            self._beaten.set()
            return True
        if not nx:
            await self._store.client.set(key, holder, ex=keys.HEARTBEAT_SECONDS)
        return False

    async def _beat(self) -> None:
        if not await self._hold_name():
            # Out of touch for so long that another took it. What is pending for the name is that one's now.
            logger.warning("stream.name_lost", stream=self._stream, name=self.name)
            self._sure_until = 0.0
            await self._for_ever(self._take_name)
        # Before 7.2 Redis lists a consumer only once it was given something; operators look for it at once.
        await self._store.client.xgroup_createconsumer(self.key(keys.partition_tags()[0]), self.group, self.name)

    async def sure(self) -> None:
        """Waits while another worker may have this one's name, and with it what is pending: both would send it."""
        while time.monotonic() > self._sure_until:
            self._beaten.clear()
            await self._beaten.wait()

    # -- entries ---------------------------------------------------------------------------------------------

    async def _read(self, tag: str) -> bool:
        await self._room()
        # At first the worker's own pending entries: those of whoever held its name before, and those of a read whose
        # answer was lost.
        last = self._resumed.pop(tag, "0")
        entries = await self._read_from(tag, last)
        self._take(tag, entries)
        self._resumed[tag] = entries[-1][0] if entries and last != ">" else ">"
        return False

    async def _read_from(self, tag: str, last: str) -> list[tuple[str, dict[str, str] | None]]:
        block = BLOCK if last == ">" else None
        # A connection whose other end vanished without a word stays silent for ever.
        async with asyncio.timeout(BLOCK / 1000 + ATTEMPT):
            answer = await self._waiting.xreadgroup(
                self.group, self.name, {self.key(tag): last}, count=BATCH, block=block
            )
        return answer[0][1] if answer else []

    def _take(self, tag: str, entries: list[tuple[str, dict[str, str] | None]]) -> None:
        held = self._held[tag]
        for entry_id, fields in entries:
            if fields and entry_id not in held:
                held.add(entry_id)
                self._handle(Entry(tag, entry_id, fields))

    async def _keep(self, tag: str) -> None:
        """What is in memory is being worked on: nobody else may claim it."""
        await self._set_idle(tag, list(self._held[tag]), 0)

    async def _set_idle(self, tag: str, ids: list[str], idle: int) -> None:
        for first in range(0, len(ids), BATCH):
            batch = ids[first : first + BATCH]
            await scripts.keep(
                self._store, self.key(tag), group=self.group, consumer=self.name, idle=idle, entries=batch
            )

    async def _claim(self, tag: str) -> bool:
        """Goes on for as long as Redis is there. Before, it may have been away: then what the living hold looks as
        idle as what the dead left, until they had the time to keep it."""
        await self._forget(tag)
        await asyncio.sleep(self._idle / 3000)
        while True:
            end_if_cancelled()
            cursor = ""
            while cursor != "0-0":  # one step looks at a thousand entries, all of which the living may hold
                await self._room()
                cursor, entries, *_ = await self._store.client.xautoclaim(
                    self.key(tag), self.group, self.name, self._idle, cursor or "0-0", count=BATCH
                )
                if entries:
                    logger.warning("stream.claimed", stream=self._stream, entries=len(entries))
                self._take(tag, entries)
            await asyncio.sleep(CLAIM)

    async def _forget(self, tag: str) -> None:
        for consumer in await self._store.client.xinfo_consumers(self.key(tag), self.group):
            if consumer["pending"] == 0 and consumer["idle"] > FORGOTTEN:
                await self._store.client.xgroup_delconsumer(self.key(tag), self.group, consumer["name"])
