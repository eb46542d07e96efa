"""Sends events to their accounts' receivers.

Each account has a lane: what was read for it waits there in order of arrival. One delivery is under way at first, twice
as many after each that did not time out, and one again after a timeout, so that a receiver that hangs costs its own
account's time and little else. A lane that is full gives up the newest, and so does the longest lane that stands still
when the worker's memory is full: logged as dropped, never silently. While every lane moves, a full memory only waits.

One delivery, from top to bottom: still mine? → where to? → too old? → sign → POST within 5 s → log and acknowledge in
one step. An answer is never asked for twice: its outcome is kept until Redis has taken it. The one case of a second
attempt is a worker that died between the POST and the log: the event's id is the same, so that receivers can tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, Literal, NamedTuple

import msgspec
import structlog

from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.errors import BackboneUnavailable
from gateway.events.receivers import GROUP, STREAM, Receiver, signed
from gateway.outbound.addresses import CallFailed
from gateway.settings import Settings
from gateway.store import scripts
from gateway.store.client import ATTEMPT, Store, backbone, until_redis_answers
from gateway.store.scripts import Claim, Delivery, QueuedEvent
from workers.stream import Consumer, Entry
from workers.webhooks.poster import Poster

logger = structlog.get_logger()

BUDGET = 5.0  # seconds, from the look-up of the name to the response's headers
ANSWER_BYTES = 65_536  # read of a response, within the budget
LANE = 10_000  # events of one account in memory
LANE_UNDER_WAY = 8
UNDER_WAY = 2_048  # deliveries of one worker
HELD = 20_000  # events of one worker in memory
STILL = 0.5  # seconds without a delivery that ended in time
TOO_OLD = 86_400.0  # seconds
FILES = 16_384  # sockets: those under way, and those kept for the next

Outcome = Literal["delivered", "failed", "dropped"]


class Result(NamedTuple):
    outcome: Outcome
    status: int | None = None
    reason: str = ""


class Lane:
    __slots__ = ("allowed", "entries", "moved", "offered", "under_way")

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.under_way = 0
        self.allowed = 1  # under way
        self.moved = time.monotonic()  # when a delivery ended in time, or the first began to wait
        self.offered = False

    @property
    def open(self) -> bool:
        return bool(self.entries) and self.under_way < self.allowed

    def learn(self, result: Result) -> None:
        if result.reason == "timeout":
            self.allowed = 1
        else:
            self.allowed = min(2 * self.allowed, LANE_UNDER_WAY)
            self.moved = time.monotonic()


class Sender:
    def __init__(self, settings: Settings) -> None:
        self._store = Store(settings.redis_url)
        self._vault = Vault(settings.encryption_key)
        self._http = Poster(allow_private=settings.allow_private_addresses, ca_file=settings.ca_file or None)
        # Seconds after asking in which a delivery may start: it must end before anybody may claim its event.
        self._believed = settings.webhook_claim_idle - BUDGET - 1
        self._lanes: dict[str, Lane] = {}
        self._ready: deque[str] = deque()  # accounts whose lane may have something to send, each once
        self._running: set[asyncio.Task[None]] = set()
        self._dropping: set[asyncio.Task[None]] = set()
        self._less = asyncio.Event()
        self._consumer = Consumer(self._store, STREAM, GROUP, settings.webhook_claim_idle, self._accept, self._room)

    async def run(self) -> None:
        """Until it is cancelled; then what is under way ends, within its budget, and the rest is given back."""
        try:
            await self._consumer.run()
        finally:
            for lane in self._lanes.values():
                lane.entries.clear()
            self._ready.clear()
            await self._finish_running()
            try:
                with backbone():
                    async with asyncio.timeout(ATTEMPT):
                        await self._consumer.release()
            except BackboneUnavailable as error:
                logger.warning("webhooks.not_released", error=type(error.__cause__).__name__)
            await self._http.close()
            await self._store.close()

    async def _finish_running(self) -> None:
        running = self._running | self._dropping
        if running:
            await asyncio.wait(running, timeout=BUDGET + 2 * ATTEMPT)
        for task in running:  # Redis is away: what was sent and not written down is sent again, by another
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # -- fairness --------------------------------------------------------------------------------------------

    async def _room(self) -> None:
        while self._consumer.holding >= HELD:
            self._give_up()
            self._less.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STILL):
                    await self._less.wait()

    def _give_up(self) -> None:
        """Of the longest lane that stands still, the newer half."""
        before = time.monotonic() - STILL
        still = [lane.entries for lane in self._lanes.values() if lane.moved < before]
        if still and not self._dropping:
            longest = max(still, key=len)
            for _ in range(len(longest) // 2):
                self._drop(longest.pop())

    def _accept(self, entry: Entry) -> None:
        account = entry.fields["account"]
        lane = self._lanes.get(account)
        if lane is None:
            lane = self._lanes[account] = Lane()
        if len(lane.entries) >= LANE:
            self._drop(entry)
            return
        lane.entries.append(entry)
        self._offer(account, lane)
        self._pump()

    def _offer(self, account: str, lane: Lane) -> None:
        if lane.open and not lane.offered:
            lane.offered = True
            self._ready.append(account)

    def _pump(self) -> None:
        """Starts deliveries, one of each account in turn."""
        while self._ready and len(self._running) < UNDER_WAY:
            account = self._ready.popleft()
            lane = self._lanes[account]
            lane.offered = False
            if lane.open:
                lane.under_way += 1
                self._start(self._running, self._take_turn(account, lane, lane.entries.popleft()))
                self._offer(account, lane)

    def _drop(self, entry: Entry) -> None:
        self._start(self._dropping, self._log_dropped(entry))

    def _start(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _done(self, entry: Entry) -> None:
        self._consumer.done(entry)
        self._less.set()

    # -- one delivery ----------------------------------------------------------------------------------------

    async def _take_turn(self, account: str, lane: Lane, entry: Entry) -> None:
        try:
            await self._deliver(entry, lane)
        except Exception as error:
            # A fault of ours: it stays pending, is claimed when it has been idle long enough, and expires in the end.
            logger.error("delivery.postponed", delivery=entry.fields["id"], exc_info=error)
        finally:
            self._done(entry)
            lane.under_way -= 1
            if lane.entries or lane.under_way:
                self._offer(account, lane)
            else:
                self._lanes.pop(account, None)
            self._pump()

    async def _deliver(self, entry: Entry, lane: Lane) -> None:
        asked = float("-inf")
        while time.monotonic() - asked > self._believed:
            # Again when this process stood still, or the answer did: by now another may have claimed the entry.
            asked = time.monotonic()
            claim = await until_redis_answers(lambda: self._begin(entry), waiting="delivery.waiting")
            if not claim.granted:
                return
        began = time.time()
        if began - int(entry.fields["at"]) / 1000 > TOO_OLD:
            result = Result("dropped", reason="expired")
        elif not claim.receiver:
            result = Result("dropped", reason="no-receiver")
        else:
            result = await self._send(entry, msgspec.json.decode(claim.receiver, type=Receiver), began)
            lane.learn(result)
        await self._log(entry, result, began)

    async def _begin(self, entry: Entry) -> Claim:
        """Whether it is this worker's to send, and the receiver's record."""
        await self._consumer.sure()
        account, consumer = entry.fields["account"], self._consumer.name
        return await scripts.begin(self._store, entry.tag, account, group=GROUP, consumer=consumer, entry=entry.id)

    async def _send(self, entry: Entry, receiver: Receiver, now: float) -> Result:
        fields = entry.fields
        try:
            secret = self._vault.open(receiver.secret)
        except NoEncryptionKey as error:
            logger.error("delivery.sealed", account=fields["account"], error=str(error))
            return Result("failed", reason="secret")
        body, headers = signed(secret, fields["id"], fields["type"], fields["data"], now)
        try:
            status = await self._http.post(receiver.url, headers, body, budget=BUDGET, most=ANSWER_BYTES)
        except CallFailed as error:
            return Result("failed", reason=error.reason)
        except Exception as error:  # an outcome all the same: without one it would be sent again
            logger.error("delivery.crashed", delivery=fields["id"], exc_info=error)
            return Result("failed", reason="internal")
        if 200 <= status < 300:
            return Result("delivered", status)
        return Result("failed", status, "status")

    async def _log_dropped(self, entry: Entry) -> None:
        try:
            await self._log(entry, Result("dropped", reason="overflow"), time.time())
        finally:
            self._done(entry)

    async def _log(self, entry: Entry, result: Result, began: float) -> None:
        fields, tag = entry.fields, entry.tag
        event = QueuedEvent(fields["id"], fields["account"], fields["app"], fields["type"], fields["data"])
        duration = int((time.time() - began) * 1000)
        delivery = Delivery(result.outcome, int(began * 1000), duration, result.status, result.reason)
        if await until_redis_answers(
            lambda: scripts.finish(self._store, tag, event, delivery, group=GROUP, entry=entry.id),
            waiting="delivery.waiting",
        ):
            logger.info(
                "delivery",
                delivery=fields["id"],
                account=fields["account"],
                type=fields["type"],
                outcome=result.outcome,
                status=result.status,
                reason=result.reason,
            )


async def run(settings: Settings) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft < wanted:  # a thousand is usual, and a delivery without a socket fails
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    await Sender(settings).run()
