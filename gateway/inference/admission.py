"""Admission: may a request pass, and what may it cost at most. Settlement: what it did cost.

Each is one script and one round trip. A settlement is idempotent by its reservation's id, so that whatever fails it
(Redis away, a cancelled request, a lost answer) hands it to a queue that repeats it until it is written. One that
is never written stays at its bound: reserved until its lease ends, then settled in full by the monitors worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

import msgspec
import structlog

from gateway.accounts.records import Account, App
from gateway.errors import AppRateLimited, BackboneUnavailable, Headers, ServiceError, SpendCapReached, UserRateLimited
from gateway.ids import request_id
from gateway.settings import Settings
from gateway.store import keys
from gateway.store.client import FAULTS, Store
from gateway.store.scripts import Script
from gateway.telemetry.metrics import Metrics

log = structlog.get_logger()

UNWRITTEN = 10_000  # settlements that may wait for Redis; the oldest beyond it stay at their bound
FAULTS_A_PASS = 8  # after which a pass over them gives Redis a rest
IN_TIME = 2.0  # seconds in which an admission must reach Redis: after that nobody waits for it
WHOLE = -1  # settle at the bound


class Reservation(msgspec.Struct, frozen=True):
    id: str
    account: str
    bound: int  # nano-euro


class Admitted(msgspec.Struct, frozen=True):
    reservation: Reservation | None  # None when nothing was to be reserved
    headers: Headers  # RateLimit-*: the tighter of the two limits


class Unwritten(msgspec.Struct, frozen=True):
    reservation: Reservation
    cost: int
    due: float = 0.0  # monotonic seconds; a lost admission is released when it can no longer arrive


class Admission:
    def __init__(self, settings: Settings, store: Store, metrics: Metrics) -> None:
        self._limits, self._caps = settings.rate_limits, settings.daily_caps
        self._lease = int((settings.provider_timeouts.total + 60) * 1000)  # ms
        self._store, self._metrics = store, metrics
        self._admit, self._settle = Script("admit"), Script("settle")
        self._unwritten: OrderedDict[str, Unwritten] = OrderedDict()
        self._waiting = asyncio.Event()
        self._ahead: float | None = None  # Redis's clock less ours, ms; learnt from every answer

    async def admit(self, app: App, account: Account, user: str, bound: int, *, again: bool = True) -> Admitted:
        """`bound`: nano-euro; 0 reserves nothing. Raises the 429s, 402, or BackboneUnavailable."""
        tag = keys.tag(account.id)
        reservation = Reservation(request_id(), account.id, bound)
        sent = time.monotonic()
        latest = 0 if self._ahead is None else int((sent + IN_TIME) * 1000 + self._ahead)
        try:
            reply = await self._store.run(
                self._admit,
                [
                    keys.app_window_key(tag, app.id),
                    keys.user_window_key(tag, app.id, user),
                    f"{keys.spend_prefix(tag)}:{account.id}",
                    *keys.reservation_keys(tag),
                ],
                self._limits.app,
                self._limits.user,
                bound,
                self._caps[account.plan],
                reservation.id,
                account.id,
                self._lease,
                latest,
            )
        except BaseException as error:
            # The script may have run and only its answer been lost, or may yet run, in time.
            if bound:
                self._later(Unwritten(reservation, 0, sent + IN_TIME + 1))
            if isinstance(error, FAULTS):
                log.error("admission.failed", error=type(error).__name__)
                raise BackboneUnavailable from error
            raise
        clock = float(reply[-1]) - time.monotonic() * 1000
        if reply[0] == "late":
            # Redis's clock was set, or an answer that took long misled us about it: it is known now.
            self._ahead = clock
            if not again:
                raise BackboneUnavailable
            return await self.admit(app, account, user, bound, again=False)
        self._ahead = clock if self._ahead is None or clock > self._ahead else (self._ahead * 15 + clock) / 16
        return self._read(reply, reservation, self._caps[account.plan])

    def _read(self, reply: list[str | int], reservation: Reservation, cap: int) -> Admitted:
        verdict, _, app_count, app_frees, user_count, user_frees, now = reply
        app_left, user_left = self._limits.app - int(app_count), self._limits.user - int(user_count)
        tightest = (
            (self._limits.app, app_left, int(app_frees))
            if app_left < user_left or verdict == "app"
            else (self._limits.user, user_left, int(user_frees))
        )
        limit, left, frees = tightest
        headers = [
            (b"ratelimit-limit", b"%d" % limit),
            (b"ratelimit-remaining", b"%d" % max(left, 0)),
            (b"ratelimit-reset", b"%d" % -(-frees // 1_000_000)),
        ]
        if verdict == "ok":
            self._metrics.reserved(reservation.bound)
            return Admitted(reservation if reservation.bound else None, headers)
        self._metrics.refused(str(verdict))
        error: ServiceError
        match verdict:
            case "app":
                # Where both windows are full, the later one decides when the next request passes.
                wait = max(frees, int(user_frees)) if user_left <= 0 else frees
                error = AppRateLimited(retry_after=wait / 1_000_000, headers=headers)
            case "user":
                error = UserRateLimited(retry_after=int(user_frees) / 1_000_000, headers=headers)
            case _:
                # A request above a whole day's cap passes on no day.
                midnight = 86_400 - int(now) // 1000 % 86_400
                error = SpendCapReached(retry_after=None if reservation.bound > cap else midnight)
        raise error

    async def settle(self, reservation: Reservation, cost: int) -> None:
        """Ends the reservation at `cost` nano-euro, 0 for a release, WHOLE for its bound. Never raises a fault.

        Returns when it is written, or when the first attempt failed and the queue has it.
        """
        try:
            settled = await self._write(reservation, cost)
        except FAULTS as error:
            log.error("settlement.postponed", reservation=reservation.id, error=type(error).__name__)
            self._later(Unwritten(reservation, cost))
        except BaseException:
            self._later(Unwritten(reservation, cost))
            raise
        else:
            self._metrics.settled(max(settled, 0))

    async def _write(self, reservation: Reservation, cost: int) -> int:
        """Nano-euro settled, or -1 when there is no such reservation."""
        tag = keys.tag(reservation.account)
        script_keys = [*keys.reservation_keys(tag), keys.spend_prefix(tag)]
        return int(await self._store.run(self._settle, script_keys, reservation.id, cost))

    def _later(self, unwritten: Unwritten) -> None:
        # The first end of a reservation counts, as it does in Redis.
        if len(self._unwritten) >= UNWRITTEN:
            self._unwritten.popitem(last=False)
        self._unwritten.setdefault(unwritten.reservation.id, unwritten)
        self._waiting.set()

    async def keep_settling(self) -> None:
        """Runs as long as the process: repeats what could not be written."""
        while True:
            await self._waiting.wait()
            await self.settle_unwritten()
            if self._unwritten:
                self._waiting.set()
                await asyncio.sleep(0.5)

    async def settle_unwritten(self, *, at_last: bool = False) -> bool:
        """One pass over what is due, oldest first, or `at_last` over everything; False if Redis failed some of it."""
        self._waiting.clear()
        now, faults = time.monotonic(), 0
        for key, unwritten in list(self._unwritten.items()):
            if now < unwritten.due and not at_last:
                continue
            self._metrics.settlement_retries.inc()
            try:
                settled = await self._write(unwritten.reservation, unwritten.cost)
            except FAULTS:
                # The others may belong to another node of a cluster: they come first the next time.
                self._unwritten.move_to_end(key)
                faults += 1
                if faults >= FAULTS_A_PASS:
                    break
                continue
            self._unwritten.pop(key, None)
            self._metrics.settled(max(settled, 0))
        return faults == 0
