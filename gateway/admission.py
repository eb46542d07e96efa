"""Admission: may a request pass, and what may it cost at most. Settlement: what it did cost.

Each is one script and one round trip. A settlement is idempotent by its reservation's id, so that whatever fails it
(Redis away, a cancelled request, a lost answer) hands it to a queue that repeats it until it is written. One that
is never written stays at its bound: reserved until its lease ends, then settled in full by the monitors worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict

import msgspec
import structlog

from . import store as s
from .errors import (
    AppRateLimited,
    BackboneUnavailable,
    Headers,
    ServiceError,
    SpendCapReached,
    UserRateLimited,
)
from .metrics import Metrics
from .registry import Account, App
from .settings import Settings

log = structlog.get_logger()

UNWRITTEN = 10_000  # settlements that may wait for Redis; the oldest beyond it stay at their bound
WHOLE = -1  # settle at the bound


class Reservation(msgspec.Struct, frozen=True):
    id: str
    account: str
    bound: int  # nano-euro


class Admitted(msgspec.Struct, frozen=True):
    reservation: Reservation | None  # None when nothing was to be reserved
    headers: Headers  # RateLimit-*: the tighter of the two limits


class Admission:
    def __init__(self, settings: Settings, store: s.Store, metrics: Metrics) -> None:
        self._limits, self._caps = settings.rate_limits, settings.daily_caps
        self._lease = int((settings.provider_timeouts.total + 60) * 1000)  # ms
        self._store, self._metrics = store, metrics
        self._admit, self._settle = s.Script("admit"), s.Script("settle")
        self._unwritten: OrderedDict[str, tuple[Reservation, int]] = OrderedDict()
        self._waiting = asyncio.Event()

    async def admit(self, app: App, account: Account, user: str, bound: int) -> Admitted:
        """`bound`: nano-euro; 0 reserves nothing. Raises the 429s, 402, or BackboneUnavailable."""
        tag = s.tag(account.id)
        reservation = Reservation(os.urandom(12).hex(), account.id, bound)
        try:
            reply = await self._store.run(
                self._admit,
                [
                    f"{tag}:window:app:{app.id}",
                    # The user's id is the app's affair: Redis sees only its hash.
                    f"{tag}:window:user:{app.id}:{hashlib.sha256(user.encode()).hexdigest()[:32]}",
                    f"{tag}:spend:{account.id}",
                    f"{tag}:reservations",
                    f"{tag}:leases",
                ],
                self._limits.app,
                self._limits.user,
                bound,
                self._caps[account.plan],
                reservation.id,
                account.id,
                self._lease,
            )
        except BaseException as error:
            # The script may have run and only its answer been lost.
            if bound:
                self._later(reservation, 0)
            if isinstance(error, s.FAULTS):
                log.error("admission.failed", error=type(error).__name__)
                raise BackboneUnavailable from error
            raise
        return self._read(reply, reservation)

    def _read(self, reply: list[str | int], reservation: Reservation) -> Admitted:
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
                error = AppRateLimited(retry_after=frees / 1_000_000, headers=headers)
            case "user":
                error = UserRateLimited(retry_after=int(user_frees) / 1_000_000, headers=headers)
            case _:
                midnight = 86_400 - int(now) // 1000 % 86_400
                error = SpendCapReached(retry_after=midnight)
        raise error

    async def settle(self, reservation: Reservation, cost: int) -> None:
        """Ends the reservation at `cost` nano-euro, 0 for a release, WHOLE for its bound. Never raises a fault.

        Returns when it is written, or when the first attempt failed and the queue has it.
        """
        try:
            settled = await self._write(reservation, cost)
        except s.FAULTS as error:
            log.error("settlement.postponed", reservation=reservation.id, error=type(error).__name__)
            self._later(reservation, cost)
        except BaseException:
            self._later(reservation, cost)
            raise
        else:
            self._metrics.settled(settled)

    async def _write(self, reservation: Reservation, cost: int) -> int:
        tag = s.tag(reservation.account)
        keys = [f"{tag}:reservations", f"{tag}:leases", f"{tag}:spend"]
        settled = int(await self._store.run(self._settle, keys, reservation.id, cost))
        return max(settled, 0)

    def _later(self, reservation: Reservation, cost: int) -> None:
        if len(self._unwritten) >= UNWRITTEN:
            self._unwritten.popitem(last=False)
        self._unwritten[reservation.id] = (reservation, cost)
        self._waiting.set()

    async def keep_settling(self) -> None:
        """Runs as long as the process: repeats what could not be written."""
        while True:
            await self._waiting.wait()
            if not await self.settle_unwritten():
                await asyncio.sleep(0.5)

    async def settle_unwritten(self) -> bool:
        """One pass over the queue, oldest first; False when Redis is still away."""
        self._waiting.clear()
        for key, (reservation, cost) in list(self._unwritten.items()):
            self._metrics.settlement_retries.inc()
            try:
                settled = await self._write(reservation, cost)
            except s.FAULTS:
                self._waiting.set()
                return False
            self._metrics.settled(settled)
            self._unwritten.pop(key, None)
        return True
