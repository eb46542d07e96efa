"""Work that waits in Redis Streams: one stream a partition, one consumer group, any number of workers.

- An entry is pending for the worker that read it until its outcome is written; then it is acknowledged and removed.
- A worker's name is stable: it holds the lowest free number of its host, by a heartbeat that expires. What is pending
  for a name is taken up by whoever holds it next.
- What a worker has in memory it claims again for itself well before `claim_idle`; what nobody claimed for that long
  belongs to a worker that died, and any other claims it.
- Each partition is read on a connection of its own, so that a blocking read delays neither another partition (which
  may be on another node of a cluster) nor the claims.
- When Redis is away every part of this waits and tries again, for ever.

The handler decides what to take on: `room` is waited for before each read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import structlog
from redis.exceptions import ResponseError

from gateway import store as s

logger = structlog.get_logger()

BLOCK = 5_000  # ms
BATCH = 100  # entries of one read
HEARTBEAT = 5.0  # seconds
HEARTBEAT_LIFE = 15  # seconds
FORGOTTEN = 86_400_000  # ms after which the name of a worker with nothing pending is removed
NAMES = 1_000  # of one host


class Entry(NamedTuple):
    tag: str  # its partition
    id: str  # in the stream
    fields: dict[str, str]


class Consumer:
    def __init__(
        self,
        store: s.Store,
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
        self.held: set[tuple[str, str]] = set()
        self._resumed: dict[str, str] = {}  # partition -> where reading goes on; ">" once nothing old is left
        self._keep_script = s.Script("keep")

    def key(self, tag: str) -> str:
        return f"{tag}:{self._stream}"

    # -- from start to end -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled. What is in memory then stays the handler's to finish; see `release`."""
        try:
            await self._for_ever(self._take_name)
            tasks = [self._for_ever(self._read, tag) for tag in s.partition_tags()]
            third = self._idle / 3000
            await asyncio.gather(
                *tasks,
                self._every(HEARTBEAT, self._beat),
                self._every(third, self._keep),
                self._every(third, self._claim),
            )
        finally:
            await self._waiting.aclose()

    async def release(self) -> None:
        """After a drain: what was read and not finished is another worker's at once."""
        await self._set_idle(self._idle * 10)
        await self._store.client.delete(self._heartbeat_key())

    def done(self, entry: Entry) -> None:
        self.held.discard((entry.tag, entry.id))

    async def _for_ever(self, work: Callable[..., Coroutine[Any, Any, bool]], *args: str) -> None:
        """Again and again until it gives True; a fault of Redis costs a growing pause, never the worker."""
        pause = 0.1
        while True:
            try:
                if await work(*args):
                    return
                pause = 0.1
            except s.FAULTS as error:
                if not await self._mend(error):
                    logger.warning("stream.waiting", stream=self._stream, error=type(error).__name__)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, 5.0)

    async def _every(self, seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work()
            except s.FAULTS as error:
                await self._mend(error)
            await asyncio.sleep(seconds)

    async def _mend(self, error: BaseException) -> bool:
        """The group is made where it is missing: on a new server, or after one lost its data."""
        if not (isinstance(error, ResponseError) and str(error).startswith("NOGROUP")):
            return False
        for tag in s.partition_tags():
            try:
                await self._store.client.xgroup_create(self.key(tag), self.group, "0", mkstream=True)
            except ResponseError as exists:
                if not str(exists).startswith("BUSYGROUP"):
                    raise
            except s.FAULTS:
                return False
        return True

    # -- names -----------------------------------------------------------------------------------------------

    def _heartbeat_key(self) -> str:
        return f"worker:{self.group}:{self.name}"

    async def _take_name(self) -> bool:
        for number in range(1, NAMES):
            self.name = f"{socket.gethostname()}-{number}"
            if await self._store.client.set(self._heartbeat_key(), "1", nx=True, ex=HEARTBEAT_LIFE):
                logger.info("stream.joined", stream=self._stream, name=self.name)
                return True
        return False

    async def _beat(self) -> None:
        await self._store.client.set(self._heartbeat_key(), "1", ex=HEARTBEAT_LIFE)

    # -- entries ---------------------------------------------------------------------------------------------

    async def _read(self, tag: str) -> bool:
        await self._room()
        # At first the worker's own pending entries: those of whoever held its name before.
        last = self._resumed.get(tag, "0")
        entries = await self._read_from(tag, last)
        self._take(tag, entries)
        if last != ">":
            self._resumed[tag] = entries[-1][0] if entries else ">"
        return False

    async def _read_from(self, tag: str, last: str) -> list[tuple[str, dict[str, str] | None]]:
        block = BLOCK if last == ">" else None
        answer = await self._waiting.xreadgroup(self.group, self.name, {self.key(tag): last}, count=BATCH, block=block)
        return answer[0][1] if answer else []

    def _take(self, tag: str, entries: list[tuple[str, dict[str, str] | None]]) -> None:
        for entry_id, fields in entries:
            if fields and (tag, entry_id) not in self.held:
                self.held.add((tag, entry_id))
                self._handle(Entry(tag, entry_id, fields))

    async def _keep(self) -> None:
        """What is in memory is being worked on: nobody else may claim it."""
        await self._set_idle(0)

    async def _set_idle(self, idle: int) -> None:
        ids: dict[str, list[str]] = {}
        for tag, entry_id in self.held:
            ids.setdefault(tag, []).append(entry_id)
        for tag, own in ids.items():
            for first in range(0, len(own), BATCH):
                batch = own[first : first + BATCH]
                await self._store.run(self._keep_script, [self.key(tag)], self.group, self.name, idle, *batch)

    async def _claim(self) -> None:
        for tag in s.partition_tags():
            await self._room()
            _, entries, *_ = await self._store.client.xautoclaim(
                self.key(tag), self.group, self.name, self._idle, "0", count=BATCH
            )
            if entries:
                logger.warning("stream.claimed", stream=self._stream, entries=len(entries))
            self._take(tag, entries)
            for consumer in await self._store.client.xinfo_consumers(self.key(tag), self.group):
                if consumer["pending"] == 0 and consumer["idle"] > FORGOTTEN:
                    await self._store.client.xgroup_delconsumer(self.key(tag), self.group, consumer["name"])
