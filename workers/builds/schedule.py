"""Decides which deploy is built next, so that no account's builds delay those of another account.

All builders share one queue (`lua/deploys/schedule_builds.lua`). Each builder writes to Redis which deploys wait in its
memory. Redis grants slots to the next deploys, and any builder may start them. A builder that starts another builder's
deploy claims its entry. Redis forgets a dead builder after `HELD_MS`. Other builders claim its entries, like those of
any dead worker.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec

from gateway.deploys import scripts
from gateway.deploys.positions import Position
from gateway.errors import BackboneUnavailable
from gateway.keys import BUILD_QUEUE_KEYS, deploy_key
from gateway.loops import every, until_set
from gateway.redis.client import Store
from workers.stream import Consumer, Entry

HELD_MS = 15_000  # after which a silent builder is forgotten
BATCH_DEPLOYS = 100  # whose records are read in one round trip
POLL_SECONDS = 0.5  # between requests for slots, if nothing changes here
PAUSE_SECONDS = 0.05  # before a request, so that changes that come together cause one request


class Waiting(msgspec.Struct, frozen=True):
    account: str
    app: str
    reuse: bool  # it serves an existing release, and needs no slot
    tag: str
    entry: str


class Running(msgspec.Struct):
    account: str
    app: str
    building: bool = True  # it uses a slot, unless it serves an existing release


class Schedule:
    def __init__(self, store: Store, slots: int, start: Callable[[Entry], None]) -> None:
        """`start` starts a deploy and returns at once."""
        self._store, self._slots, self._start = store, slots, start
        self._waiting: dict[str, tuple[Entry, Waiting]] = {}  # by deploy
        self._new: list[Entry] = []  # whose records have not been read
        self._added: dict[str, float] = {}  # deploy → when its entry was added, on the clock of traces
        self._running: dict[str, Running] = {}  # by deploy
        self._changed = asyncio.Event()
        self.moved = asyncio.Event()  # a change has been written to Redis, so positions may have changed
        self.moved.set()

    def add_entry(self, entry: Entry) -> None:
        self._new.append(entry)
        self._added[entry.fields["id"]] = time.perf_counter()
        self._changed.set()

    def added_at(self, deploy_id: str) -> float | None:
        """Returns when the deploy's entry was added here, by `time.perf_counter`."""
        return self._added.get(deploy_id)

    def free_slot(self, deploy_id: str) -> None:
        """Frees the slot of a deploy whose build is over. The deploy continues."""
        self._running[deploy_id].building = False
        self._changed.set()

    def end_deploy(self, deploy_id: str) -> None:
        self._added.pop(deploy_id, None)
        self._running.pop(deploy_id, None)
        self._changed.set()

    async def run(self, builder: str, consumer: Consumer) -> None:
        """Runs until canceled. `builder` is an id that no other builder has at the same time."""

        async def start_granted() -> None:
            changed = self._changed.is_set()
            self._changed.clear()
            with contextlib.suppress(BackboneUnavailable):
                await self._start_granted(builder, consumer)
                if changed:
                    self.moved.set()
            await until_set(self._changed, POLL_SECONDS)

        await every(PAUSE_SECONDS, start_granted)

    async def leave_queue(self, builder: str) -> None:
        """Gives up all slots at once. Raises BackboneUnavailable."""
        await scripts.schedule_builds(self._store, builder, {}, {}, HELD_MS, -1)

    async def _look_up_records(self) -> None:
        """Reads new entries' records. Only queued deploys with a build need a slot. Raises BackboneUnavailable."""
        entries = self._new[:BATCH_DEPLOYS]
        async with self._store.client.pipeline(transaction=False) as pipeline:
            for entry in entries:
                pipeline.hmget(deploy_key(entry.fields["account"], entry.fields["id"]), "state", "release")
            found = await pipeline.execute(raise_on_error=False)
        for entry, answer in zip(entries, found, strict=True):
            fields = entry.fields
            # A deploy whose record can't be read needs no slot either: processing it will fail.
            free = not isinstance(answer, list) or answer[0] != "queued" or answer[1] is not None
            self._waiting[fields["id"]] = (entry, Waiting(fields["account"], fields["app"], free, entry.tag, entry.id))
        del self._new[: len(entries)]

    async def _start_granted(self, builder: str, consumer: Consumer) -> None:
        await consumer.confirm_name()  # it may have to claim entries
        while self._new:
            await self._look_up_records()
        waiting = {name: msgspec.json.encode(known).decode() for name, (_, known) in self._waiting.items()}
        running = {name: msgspec.json.encode(known).decode() for name, known in self._running.items()}
        granted, elsewhere = await scripts.schedule_builds(self._store, builder, waiting, running, HELD_MS, self._slots)
        for deploy_id in elsewhere:
            entry, _ = self._waiting.pop(deploy_id)
            self._added.pop(deploy_id, None)
            consumer.forget_entry(entry)
        for deploy_id, tag, entry_id in granted:
            entry_here = self._waiting.pop(deploy_id, None)
            found = entry_here[0] if entry_here else await consumer.claim_entry(tag, entry_id)
            if found is not None:
                self._running[deploy_id] = Running(found.fields["account"], found.fields["app"])
                self._start(found)

    async def positions(self) -> dict[str, Position]:
        """Returns what the deploys of all builders wait for, in approximate order. Raises BackboneUnavailable."""
        waiting_key, running_key, _ = BUILD_QUEUE_KEYS
        waiting = await self._store.client.hgetall(waiting_key)
        running = await self._store.client.hgetall(running_key)
        busy = {msgspec.json.decode(text)["app"]: deploy for deploy, text in running.items()}
        found: dict[str, Position] = {}
        behind: dict[str, str] = {}
        rounds: dict[str, int] = {}
        order = []
        for deploy, text in sorted(waiting.items()):
            known = msgspec.json.decode(text)
            if known["app"] in busy:
                behind[deploy] = busy[known["app"]]
            else:
                busy[known["app"]] = deploy
                rounds[known["account"]] = rounds.get(known["account"], 0) + 1
                order.append((rounds[known["account"]], deploy))
        for ahead, (_, deploy) in enumerate(sorted(order)):
            others = f"; {ahead} other{'s are' if ahead > 1 else ' is'} ahead" if ahead else ""
            found[deploy] = Position(ahead + 1, f"a free slot for builds{others}")
        for deploy, former in behind.items():
            found[deploy] = Position(len(found) + 1, f"{former}, an earlier deploy of this app")
        return found
