"""Admission: may a request pass, and what may it cost at most. Settlement: what it did cost.

Each is one script and one round trip. A settlement is idempotent by its reservation's id, so whatever makes it fail
(Redis is away, the request was canceled, an answer was lost) hands it to a queue that repeats it until it is written.
One that is never written stays reserved at its bound until its lease ends; then the monitors worker settles it in full.
A settlement carries the reservation's record, so that one that a failover lost is booked too. A former primary may
confirm settlements for a while and lose them: when another server takes its place, the last ones are repeated.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque

import msgspec
import structlog

from gateway.accounts.records import Account, App
from gateway.errors import (
    AppCapReached,
    AppRateLimited,
    BackboneUnavailable,
    Headers,
    NotReplicated,
    ServiceError,
    SpendCapReached,
    UserCapReached,
    UserRateLimited,
)
from gateway.ids import request_id
from gateway.inference.keys import user_hash
from gateway.inference.spend import scripts
from gateway.inference.spend.limits import Limits, limits_of
from gateway.inference.spend.reservations import Decision, ReservationRecord, Settlement, Window
from gateway.redis.client import Store, until_redis_answers
from gateway.redis.faults import code_of
from gateway.redis.partitions import partition_tag
from gateway.settings import Settings
from gateway.telemetry.metrics import Metrics

logger = structlog.get_logger()

UNWRITTEN = 10_000  # settlements that may wait for Redis; beyond it the oldest stay at their bound
MAX_FAULTS = 8  # in one pass over them, after which Redis gets a rest
RESERVED_WAIT = 2.0  # seconds after which to ask again when only requests under way fill the cap
RESERVED_MESSAGE = (
    "Requests that are still running hold what is left of the {}'s spending cap for today; "
    "try again after the time in Retry-After."
)
MINUTE = 60.0  # seconds
IN_TIME = 2.0  # seconds in which an admission must reach Redis; after that its caller has given up
MARGIN = 1.0  # seconds by which this process may misjudge Redis's clock
PAUSE = 0.5  # seconds between two passes over the settlements that wait for Redis
RECENT = 30.0  # seconds in which a server that is replaced may have confirmed what its successor lacks
RECENT_COUNT = 10_000
REPEATS = 50  # at once, so that Redis serves others meanwhile


class Reservation(msgspec.Struct, frozen=True):
    id: str
    account: str
    bound: int  # nano-euro
    record: ReservationRecord | None = None  # None if its admission was not answered


class Admitted(msgspec.Struct, frozen=True):
    reservation: Reservation | None  # None when nothing was to be reserved
    headers: Headers  # RateLimit-*: the tighter of the two limits


class Unwritten(msgspec.Struct, frozen=True):
    """A settlement that Redis has not confirmed."""

    reservation: Reservation
    cost: int
    due: float = 0.0  # monotonic seconds; a lost admission is released once it can no longer arrive


class RedisClock:
    """Redis's clock as this process knows it from the answers, all in milliseconds."""

    def __init__(self) -> None:
        self._offset: float | None = None  # Redis's clock less this process's monotonic one

    def at(self, monotonic: float) -> int:
        """Redis's time at a monotonic time in seconds; 0 before the first answer."""
        return 0 if self._offset is None else int(monotonic * 1000 + self._offset)

    def learn(self, now: int) -> None:
        """From an answer that just arrived. A late one lowers the offset falsely, so a lower offset counts little."""
        offset = now - time.monotonic() * 1000
        if self._offset is None or offset > self._offset:
            self._offset = offset
        else:
            self._offset = (self._offset * 15 + offset) / 16

    def reset(self, now: int) -> None:
        """After a jump of Redis's clock, or an answer so late that the offset misled."""
        self._offset = now - time.monotonic() * 1000


class Admission:
    def __init__(self, settings: Settings, store: Store, metrics: Metrics) -> None:
        self._settings = settings
        self._lease = int((settings.provider_timeouts.total + 60) * 1000)  # ms
        self._store, self._metrics = store, metrics
        self._unwritten: OrderedDict[str, Unwritten] = OrderedDict()
        self._waiting = asyncio.Event()
        self._recent: deque[tuple[float, Unwritten]] = deque(maxlen=RECENT_COUNT)  # by monotonic time, confirmed
        self._replaced = asyncio.Event()
        store.on_change(self._replaced.set)
        self._clock = RedisClock()

    async def admit(self, app: App, account: Account, user: str, bound: int) -> Admitted:
        """`bound`: nano-euro; 0 reserves nothing. Raises the 429s, 402, or BackboneUnavailable."""
        limits = limits_of(app, account.plan, self._settings)
        for _ in range(2):
            reservation = Reservation(request_id(), account.id, bound)
            decision = await self._decide(app, limits, user, reservation)
            if decision.verdict != "late":
                self._clock.learn(decision.now)
                return self._admitted(decision, reservation, app, user, limits)
            self._clock.reset(decision.now)
        raise BackboneUnavailable

    async def _decide(self, app: App, limits: Limits, user: str, reservation: Reservation) -> Decision:
        sent = time.monotonic()
        try:
            return await scripts.admit(
                self._store,
                reservation.account,
                app.id,
                user,
                app_limit=limits.requests,
                user_limit=limits.user_requests,
                bound=reservation.bound,
                cap=limits.cap,
                reservation=reservation.id,
                lease=self._lease,
                deadline=self._clock.at(sent + IN_TIME),
                app_cap=limits.app_cap,
                user_cap=limits.user_cap,
            )
        except NotReplicated:
            self._settle_later(Unwritten(reservation, 0))
            logger.error("admission.failed", error="too few replicas")
            raise
        except BaseException as error:
            # The script may have run and only its answer been lost, or it may yet run, in time.
            if reservation.bound:
                self._settle_later(Unwritten(reservation, 0, sent + IN_TIME + MARGIN))
            if isinstance(error, BackboneUnavailable):
                logger.error("admission.failed", error=code_of(error.__cause__))
            raise

    def _admitted(self, decision: Decision, reservation: Reservation, app: App, user: str, limits: Limits) -> Admitted:
        headers = _rate_headers(decision, limits)
        if decision.verdict != "ok":
            self._metrics.refused(decision.verdict)
            raise _refusal(decision, reservation.bound, limits, headers)
        account, bound = reservation.account, reservation.bound
        self._metrics.reserved(bound)
        if not bound:
            return Admitted(None, headers)
        payer = "" if limits.user_cap is None else user_hash(user)
        record = ReservationRecord(account, decision.day, bound, decision.now + self._lease, app.id, payer)
        return Admitted(Reservation(reservation.id, account, bound, record), headers)

    async def settle(self, reservation: Reservation, cost: int) -> None:
        """Ends the reservation at `cost` nano-euro; 0 releases it. Never raises a fault of Redis.

        Returns when the settlement is written, or when the first attempt failed and the queue has it.
        """
        try:
            await self._write(reservation, cost)
        except BackboneUnavailable as error:
            logger.error("settlement.postponed", reservation=reservation.id, error=code_of(error.__cause__))
            self._settle_later(Unwritten(reservation, cost))
        except BaseException:
            self._settle_later(Unwritten(reservation, cost))
            raise

    async def _write(self, reservation: Reservation, cost: int) -> None:
        settlement = await self._send(reservation, cost)
        self._metrics.settled(settlement.nano_euro)
        self._remember(Unwritten(reservation, cost))
        # Without a record the admission was not answered: most likely it never arrived.
        if reservation.record is not None and settlement.outcome in ("recovered", "unknown"):
            self._metrics.lost_reservations.inc()
            event = "settlement.recovered" if settlement.outcome == "recovered" else "settlement.lost"
            logger.error(event, reservation=reservation.id, nano_euro=cost)

    async def _send(self, reservation: Reservation, cost: int) -> Settlement:
        tag = partition_tag(reservation.account)
        return await scripts.settle(self._store, tag, reservation.id, cost, reservation.record)

    def _remember(self, settled: Unwritten) -> None:
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - RECENT:
            self._recent.popleft()
        self._recent.append((now, settled))

    async def repeat_recent(self) -> None:
        """Repeats what a replaced server confirmed. Runs as long as the process."""
        while True:
            await self._replaced.wait()
            self._replaced.clear()
            again = [settled for at, settled in self._recent if at > time.monotonic() - RECENT]
            for n in range(0, len(again), REPEATS):
                await asyncio.gather(*map(self._repeat, again[n : n + REPEATS]))

    async def _repeat(self, settled: Unwritten) -> None:
        reservation, cost = settled.reservation, settled.cost
        settlement = await until_redis_answers(lambda: self._send(reservation, cost))
        if settlement.outcome in ("settled", "recovered"):
            logger.warning("settlement.repeated", reservation=reservation.id, nano_euro=cost)

    def _settle_later(self, unwritten: Unwritten) -> None:
        # The first settlement of a reservation counts, as it does in Redis.
        if len(self._unwritten) >= UNWRITTEN:
            self._unwritten.popitem(last=False)
        self._unwritten.setdefault(unwritten.reservation.id, unwritten)
        self._waiting.set()

    async def repeat_settlements(self) -> None:
        """Runs as long as the process."""
        while True:
            await self._waiting.wait()
            await self.settle_unwritten()
            if self._unwritten:
                self._waiting.set()
                await asyncio.sleep(PAUSE)

    async def settle_unwritten(self, *, at_last: bool = False) -> bool:
        """One pass over the settlements that are due, oldest first, or with `at_last` over all.

        Returns False if Redis failed some of them.
        """
        self._waiting.clear()
        now, faults = time.monotonic(), 0
        for key, unwritten in list(self._unwritten.items()):
            if now < unwritten.due and not at_last:
                continue
            self._metrics.settlement_retries.inc()
            try:
                await self._write(unwritten.reservation, unwritten.cost)
            except BackboneUnavailable:
                # The others may belong to another node of a cluster: they come first in the next pass.
                if key in self._unwritten:  # an overflow may have removed it during the attempt
                    self._unwritten.move_to_end(key)
                faults += 1
                if faults >= MAX_FAULTS:
                    break
            else:
                self._unwritten.pop(key, None)
        return faults == 0


def _rate_headers(decision: Decision, limits: Limits) -> Headers:
    app, user = decision.app, decision.user
    app_is_tighter = limits.requests - app.count < limits.user_requests - user.count or decision.verdict == "app"
    limit, window = (limits.requests, app) if app_is_tighter else (limits.user_requests, user)
    return [
        (b"ratelimit-limit", b"%d" % limit),
        (b"ratelimit-remaining", b"%d" % max(limit - window.count, 0)),
        (b"ratelimit-reset", b"%d" % math.ceil(window.frees_in / 1_000_000)),
    ]


def _refusal(decision: Decision, bound: int, limits: Limits, headers: Headers) -> ServiceError:
    if decision.verdict == "app":
        # Where both windows are full, the later one decides when the next request can pass.
        full: list[Window] = [decision.app]
        if decision.user.count >= limits.user_requests:
            full.append(decision.user)
        wait = max(window.frees_in for window in full)
        return AppRateLimited(retry_after=wait / 1_000_000 or MINUTE, headers=headers)  # a limit of 0 never frees
    if decision.verdict == "user":
        return UserRateLimited(retry_after=decision.user.frees_in / 1_000_000 or MINUTE, headers=headers)
    return _cap_refusal(decision, bound, limits)


def _cap_refusal(decision: Decision, bound: int, limits: Limits) -> ServiceError:
    error, whose, cap = {
        "cap": (SpendCapReached, "account", limits.cap),
        "app_cap": (AppCapReached, "app", limits.app_cap or 0),
        "user_cap": (UserCapReached, "user", limits.user_cap or 0),
    }[decision.verdict]
    midnight = 86_400 - decision.now // 1000 % 86_400
    if bound > cap:  # it can pass on no day, unless the account holder raises a limit
        return error(retry_after=None if error is SpendCapReached else midnight)
    if decision.settled + max(bound, 1) > cap:
        return error(retry_after=midnight)
    return error(RESERVED_MESSAGE.format(whose), retry_after=min(RESERVED_WAIT, midnight))
