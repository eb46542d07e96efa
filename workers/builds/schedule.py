"""The queue that builders on several hosts share: whose turn it is (`lua/deploys/schedule_builds.lua`).

Each builder tells Redis which deploys wait in its memory, and takes those whose turn it is, whoever read them from
the stream. A builder that takes another one's deploy claims its entry. One that dies is forgotten after `LEASE`; its
entries are claimed as those of any dead worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable

import msgspec

from gateway.deploys import scripts
from gateway.deploys.keys import build_queue_keys, deploy_key
from gateway.deploys.positions import Position
from gateway.errors import BackboneUnavailable
from gateway.redis.client import Store
from workers.stream import Consumer, Entry

LEASE = 15_000  # ms
BATCH = 100  # records read in one round trip
POLL_INTERVAL = 0.5  # seconds between two looks for a turn, if nothing changes here


class Waiting(msgspec.Struct, frozen=True):
    account: str
    app: str
    reuse: bool  # it serves a release again, and waits for no slot
    tag: str
    entry: str


class Schedule:
    def __init__(self, store: Store, slots: int, start: Callable[[Entry], None]) -> None:
        """`start` begins with a deploy and returns at once."""
        self._store, self._slots, self._start = store, slots, start
        self._builder = secrets.token_hex(8)
        self._waiting: dict[str, tuple[Entry, Waiting]] = {}  # by deploy
        self._new: list[Entry] = []  # of which nothing is known yet
        self._running: dict[str, bool] = {}  # deploy → whether it builds
        self._changed = asyncio.Event()

    def add(self, entry: Entry) -> None:
        self._new.append(entry)
        self._changed.set()

    def free_slot(self, deploy_id: str) -> None:
        """The build is over; the deploy goes on."""
        if deploy_id in self._running:
            self._running[deploy_id] = False
            self._changed.set()

    def end(self, deploy_id: str) -> None:
        self._running.pop(deploy_id, None)
        self._changed.set()

    async def run(self, consumer: Consumer) -> None:
        """Runs until it is canceled."""
        while True:
            self._changed.clear()
            with contextlib.suppress(BackboneUnavailable):
                await self._take(consumer)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_INTERVAL)
            await asyncio.sleep(0.05)  # for what comes together

    async def leave(self) -> None:
        """Gives up all turns at once. Raises BackboneUnavailable."""
        await scripts.schedule_builds(self._store, self._builder, {}, {}, LEASE, -1)

    async def _look_up(self) -> None:
        """Only a deploy that is queued for a build needs a slot. Raises BackboneUnavailable."""
        entries = self._new[:BATCH]
        async with self._store.client.pipeline(transaction=False) as pipeline:
            for entry in entries:
                pipeline.hmget(deploy_key(entry.fields["account"], entry.fields["id"]), "state", "release")
            found = await pipeline.execute(raise_on_error=False)
        for entry, answer in zip(entries, found, strict=True):
            fields = entry.fields
            # A record that can't be read waits for no slot either: who processes it finds out.
            free = not isinstance(answer, list) or answer[0] != "queued" or answer[1] is not None
            self._waiting[fields["id"]] = (entry, Waiting(fields["account"], fields["app"], free, entry.tag, entry.id))
        del self._new[: len(entries)]

    async def _take(self, consumer: Consumer) -> None:
        while self._new:
            await self._look_up()
        waiting = {name: msgspec.json.encode(known).decode() for name, (_, known) in self._waiting.items()}
        granted, elsewhere = await scripts.schedule_builds(
            self._store, self._builder, waiting, self._running, LEASE, self._slots
        )
        for deploy_id in elsewhere:
            entry, _ = self._waiting.pop(deploy_id)
            consumer.done(entry)
        for deploy_id, tag, entry_id in granted:
            entry_here = self._waiting.pop(deploy_id, None)
            found = entry_here[0] if entry_here else await consumer.claim(tag, entry_id)
            if found is not None:
                self._running[deploy_id] = True
                self._start(found)

    async def positions(self) -> dict[str, Position]:
        """What each deploy of all builders waits for, about in the order of their turns. Raises BackboneUnavailable."""
        waiting_key, running_key, _ = build_queue_keys()
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
