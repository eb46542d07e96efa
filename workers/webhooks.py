"""Sends events to their accounts' receivers.

Each account has a lane: what was read for it waits there in order of arrival, a bounded number is under way at a
time, and after a timeout only one, so that a receiver that hangs costs its own account's time and little else. A
lane that is full gives up the newest: logged as dropped, never silently.

One delivery, from top to bottom: still mine? → where to? → too old? → sign → POST within 5 s → log and acknowledge in
one step. An answer is never asked for twice. The one case of a second attempt is a worker that died between the POST
and the log: the event's id is the same, so that receivers can tell.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, Literal, NamedTuple

import msgspec
import structlog

from gateway import store as s
from gateway.settings import Settings
from gateway.vault import NoEncryptionKey, Vault
from gateway.webhooks import GROUP, STREAM, Receiver, signed

from .egress import CallFailed
from .poster import Poster
from .stream import Consumer, Entry

logger = structlog.get_logger()

BUDGET = 5.0  # seconds, from the look-up of the name to the response's headers
ANSWER_BYTES = 65_536  # read of a response, within the budget
LANE = 2_000  # events of one account in memory
LANE_UNDER_WAY = 8
UNDER_WAY = 2_048  # deliveries of one worker
HELD = 20_000  # events of one worker in memory
TOO_OLD = 86_400.0  # seconds

Outcome = Literal["delivered", "failed", "dropped"]


class Result(NamedTuple):
    outcome: Outcome
    status: int | None = None
    reason: str = ""


class Lane:
    __slots__ = ("entries", "hangs", "under_way")

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.under_way = 0
        self.hangs = False

    @property
    def open(self) -> bool:
        return bool(self.entries) and self.under_way < (1 if self.hangs else LANE_UNDER_WAY)


class Sender:
    def __init__(self, settings: Settings) -> None:
        self._store = s.Store(settings.redis_url)
        self._vault = Vault(settings.encryption_key)
        self._http = Poster(allow_private=settings.allow_private_addresses, ca_file=settings.ca_file or None)
        self._begin, self._finish = s.Script("begin"), s.Script("finish")
        self._lanes: dict[str, Lane] = {}
        self._ready: deque[str] = deque()  # accounts whose lane may have something to send, each once
        self._running: set[asyncio.Task[None]] = set()
        self._less = asyncio.Event()
        self._consumer = Consumer(self._store, STREAM, GROUP, settings.webhook_claim_idle, self._accept, self._room)

    async def run(self) -> None:
        """Until it is cancelled; then what is under way ends, within its budget, and the rest is given back."""
        looking = asyncio.create_task(self._store.keep_looking())
        try:
            await self._consumer.run()
        finally:
            self._lanes.clear()
            self._ready.clear()
            if self._running:
                await asyncio.wait(self._running, timeout=BUDGET + 2 * s.ATTEMPT)
            try:
                async with asyncio.timeout(s.ATTEMPT):
                    await self._consumer.release()
            except s.FAULTS as error:
                logger.warning("webhooks.not_released", error=type(error).__name__)
            looking.cancel()
            await self._http.close()
            await self._store.close()

    # -- fairness --------------------------------------------------------------------------------------------

    async def _room(self) -> None:
        while len(self._consumer.held) >= HELD:
            self._less.clear()
            await self._less.wait()

    def _accept(self, entry: Entry) -> None:
        account = entry.fields["account"]
        lane = self._lanes.get(account)
        if lane is None:
            lane = self._lanes[account] = Lane()
        if len(lane.entries) >= LANE:
            self._start(self._drop(entry))
            return
        lane.entries.append(entry)
        self._offer(account, lane)
        self._pump()

    def _offer(self, account: str, lane: Lane) -> None:
        if lane.open and account not in self._ready:
            self._ready.append(account)

    def _pump(self) -> None:
        """Starts deliveries, one of each account in turn."""
        while self._ready and len(self._running) < UNDER_WAY:
            account = self._ready.popleft()
            lane = self._lanes[account]
            lane.under_way += 1
            self._start(self._take_turn(account, lane, lane.entries.popleft()))
            self._offer(account, lane)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    # -- one delivery ----------------------------------------------------------------------------------------

    async def _take_turn(self, account: str, lane: Lane, entry: Entry) -> None:
        try:
            await self._deliver(entry, lane)
        except s.FAULTS as error:
            # Its outcome is not known to Redis: it stays pending, and is claimed when it has been idle long enough.
            logger.warning("delivery.postponed", delivery=entry.fields["id"], error=type(error).__name__)
        finally:
            self._consumer.done(entry)
            self._less.set()
            lane.under_way -= 1
            if lane.entries or lane.under_way:
                self._offer(account, lane)
            else:
                self._lanes.pop(account, None)
            self._pump()

    async def _deliver(self, entry: Entry, lane: Lane) -> None:
        account = entry.fields["account"]
        mine, record = await self._store.run(
            self._begin,
            [f"{entry.tag}:{STREAM}", s.webhook_key(account)],
            GROUP,
            self._consumer.name,
            entry.id,
        )
        if not mine:
            return
        began = time.time()
        if began - int(entry.fields["at"]) / 1000 > TOO_OLD:
            result = Result("dropped", reason="expired")
        elif not record:
            result = Result("dropped", reason="no-receiver")
        else:
            result = await self._send(entry, msgspec.json.decode(record, type=Receiver), began)
            lane.hangs = result.reason == "timeout"
        await self._log(entry, result, began)

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
        if 200 <= status < 300:
            return Result("delivered", status)
        return Result("failed", status, "status")

    async def _drop(self, entry: Entry) -> None:
        try:
            await self._log(entry, Result("dropped", reason="overflow"), time.time())
        except s.FAULTS:
            pass  # it stays pending, and is claimed later
        finally:
            self._consumer.done(entry)

    async def _log(self, entry: Entry, result: Result, began: float) -> None:
        fields, tag = entry.fields, entry.tag
        written = await self._store.run(
            self._finish,
            [f"{tag}:{STREAM}", s.deliveries_key(fields["account"]), f"{tag}:outcomes"],
            GROUP,
            entry.id,
            fields["id"],
            fields["account"],
            fields["app"],
            fields["type"],
            fields["data"],
            result.outcome,
            int(began * 1000),
            int((time.time() - began) * 1000),
            "" if result.status is None else result.status,
            result.reason,
        )
        if written:
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
    await Sender(settings).run()
