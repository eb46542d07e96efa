"""Admits requests and settles them: an admission reserves a request's maximum cost, a settlement books its actual cost.

Each is one script and one round trip. A settlement is idempotent by its reservation's id. Whatever makes it fail
(Redis is away, the request was canceled, an answer was lost), it goes to a queue that repeats it until it is written.
If it is never written, the reservation stays at its maximum cost until it expires. Then the monitors worker settles
it in full. A settlement carries the reservation's record, so it is booked even if a failover lost the reservation. A
former primary may confirm settlements for a while and lose them. When another server takes its place, the last
settlements are repeated.

A request has the prices of the time at which it is reserved, by Redis's clock, also if it ends after they change. This
process chooses them by its estimate of that clock, and an admission that reaches Redis after they have changed reserves
nothing and is made again. So each reservation has the prices of its own time, whichever process made it.
"""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

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
from gateway.inference.spend import scripts
from gateway.inference.spend.budget import BudgetWatch
from gateway.inference.spend.limits import Limits, limits_of
from gateway.inference.spend.reservations import Decision, ReservationRecord, Settlement, Window
from gateway.keys import partition_tag, user_hash
from gateway.loops import batched
from gateway.redis.client import Store, patient
from gateway.redis.errors import code_of
from gateway.settings import Settings
from gateway.settings.prices import FOREVER, Tariff, tariff_at
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.usage import MAX_ATTEMPTS, LimitUses

logger = structlog.get_logger()

MAX_PENDING = 10_000  # settlements that may wait for Redis; beyond it the oldest stay at their maximum cost
MAX_FAULTS = 8  # in one pass over them, after which the pass ends and pauses
RESERVED_RETRY_SECONDS = 2.0  # the Retry-After while only running requests fill the cap
RESERVED_MESSAGE = (
    "Running requests have reserved the rest of the {}'s spending cap for today; "
    "try again after the time in Retry-After."
)
TOO_DEAR_MESSAGE = (
    "This request could cost more than the {}'s spending cap for a whole day; "
    "shorten the prompt, request fewer tokens, or {}."
)
ZERO_MESSAGE = "The {}'s spending cap is 0, so no request passes; {}."
WINDOW_SECONDS = 60.0  # of a rate limit
ARRIVAL_SECONDS = 2.0  # within which an admission must reach Redis; after that its caller has given up
CLOCK_ERROR_SECONDS = 1.0  # by which this process may misjudge Redis's clock
RETRY_SECONDS = 0.5  # between two passes over the settlements that wait for Redis
RECENT_SECONDS = 30.0  # for which a server that is being replaced may have confirmed writes that its successor lacks
MAX_RECENT = 10_000
REPEAT_BATCH = 50  # settlements that are repeated at once; Redis serves other calls in between


class Reservation(msgspec.Struct):
    id: str
    account: str
    max_cost: int  # nano-euro
    tariff: Tariff
    record: ReservationRecord | None = None  # None until its admission is answered


class Admitted(msgspec.Struct, frozen=True):
    reservation: Reservation | None  # None if there was nothing to reserve
    headers: Headers  # RateLimit-*: the tighter of the two limits
    limits: LimitUses = ()


class PendingSettlement(msgspec.Struct, frozen=True):
    """A settlement that Redis has not confirmed."""

    reservation: Reservation
    cost: int
    due: float = 0.0  # monotonic seconds; a lost admission is released once it can no longer arrive


class RedisClock:
    """An estimate of Redis's clock from its answers, in milliseconds."""

    def __init__(self) -> None:
        self._offset: float | None = None  # Redis's clock minus this process's monotonic clock

    def at(self, monotonic: float) -> int:
        """Returns Redis's time at a monotonic time in seconds, or 0 before the first answer."""
        return 0 if self._offset is None else int(monotonic * 1000 + self._offset)

    def learn(self, now: int) -> None:
        """Adjusts the estimate to an answer that just arrived. A late one lowers it falsely, so it weighs little."""
        offset = now - time.monotonic() * 1000
        if self._offset is None or offset > self._offset:
            self._offset = offset
        else:
            self._offset = (self._offset * 15 + offset) / 16

    def reset(self, now: int) -> None:
        """Replaces the estimate, after a jump of Redis's clock or an answer so late that it misled the estimate."""
        self._offset = now - time.monotonic() * 1000


class Admission:
    def __init__(
        self,
        settings: Settings,
        store: Store,
        metrics: Metrics,
        budget: BudgetWatch | None = None,
        *,
        clock: RedisClock | None = None,
        arrival: float = ARRIVAL_SECONDS,
        clock_error: float = CLOCK_ERROR_SECONDS,
        retry: float = RETRY_SECONDS,
        max_pending: int = MAX_PENDING,
    ) -> None:
        """`clock` is the estimate of Redis's clock, of which `clock_error` is the greatest error. Times are in seconds.

        `arrival` is the time in which an admission must reach Redis, and `retry` that between two passes over the
        settlements that wait for it, of which there are at most `max_pending`.
        """
        self._settings, self._budget = settings, budget
        self._arrival, self._clock_error, self._retry, self._max_pending = arrival, clock_error, retry, max_pending
        self._arrival_ms = int(arrival * 1000)
        total = settings.provider_timeouts.total
        waits = MAX_ATTEMPTS * min(settings.provider_wait, total)  # for permits
        self._life = int((total + max(60.0, waits + 30.0)) * 1000)  # ms
        self._store, self._metrics = store, metrics
        self._pending: OrderedDict[str, PendingSettlement] = OrderedDict()
        self._has_pending = asyncio.Event()
        # Confirmed settlements: the monotonic time, the reservation and its cost.
        self._recent: deque[tuple[float, Reservation, int]] = deque(maxlen=MAX_RECENT)
        self._replaced = asyncio.Event()
        store.on_change(self._replaced.set)
        self._clock = clock or RedisClock()
        self._tariff = settings.tariffs[0]  # of the last admission

    @property
    def pending(self) -> int:
        """The number of settlements that wait for Redis."""
        return len(self._pending)

    async def admit(
        self, app: App, account: Account, user: str, max_cost: Callable[[Tariff], int] | None = None
    ) -> Admitted:
        """Admits a request. `max_cost` returns the most that it costs, in nano-euro; without it nothing is reserved.

        Raises AppRateLimited, UserRateLimited, the 402 of the cap that is reached, or BackboneUnavailable.
        """
        limits = limits_of(app, account, self._settings)
        for _ in range(2):
            sent = time.monotonic()
            estimate = self._clock.at(sent)
            now = estimate or int(time.time() * 1000)  # this process's own clock serves until the first answer
            if not self._tariff.since <= now < self._tariff.until:
                self._tariff = tariff_at(self._settings.tariffs, now)
            tariff = self._tariff
            cost = 0 if max_cost is None else max_cost(tariff)
            reservation = Reservation(request_id(), account.id, cost, tariff)
            arrival = estimate + self._arrival_ms if estimate else FOREVER
            decision = await self._decide(app, limits, user, reservation, sent, min(arrival, tariff.until))
            if decision.verdict != "late":
                self._clock.learn(decision.now)
                return self._admitted(decision, reservation, app, user, limits)
            self._clock.reset(decision.now)
        raise BackboneUnavailable

    async def _decide(
        self, app: App, limits: Limits, user: str, reservation: Reservation, sent: float, deadline: int
    ) -> Decision:
        """`sent` is now, in monotonic seconds, and `deadline` is in milliseconds of Redis's clock."""
        try:
            return await scripts.admit(
                self._store,
                reservation.account,
                app.id,
                user,
                limits,
                reservation.max_cost,
                reservation=reservation.id,
                life=self._life,
                deadline=deadline,
            )
        except NotReplicated:
            self._settle_later(PendingSettlement(reservation, 0))
            logger.error("admission.failed", error="too few replicas")
            raise
        except BaseException as error:
            # The script may have run, with only its answer lost, or it may still run before the deadline.
            if reservation.max_cost:
                due = sent + self._arrival + self._clock_error
                self._settle_later(PendingSettlement(reservation, 0, due))
            if isinstance(error, BackboneUnavailable):
                logger.error("admission.failed", error=code_of(error.__cause__))
            raise

    def _admitted(self, decision: Decision, reservation: Reservation, app: App, user: str, limits: Limits) -> Admitted:
        headers, uses = _rate_headers(decision, limits), _limit_uses(decision, reservation.max_cost, limits)
        if self._budget is not None:
            self._budget.observe(app, decision.day, decision.verdict, uses)
        if decision.verdict != "ok":
            self._metrics.refusals.labels(decision.verdict).inc()
            refusal = _refusal(decision, reservation.max_cost, limits, headers)
            refusal.limits = uses
            raise refusal
        max_cost = reservation.max_cost
        self._metrics.add_reserved(max_cost)
        if not max_cost:
            return Admitted(None, headers, uses)
        payer = "" if limits.user_cap is None else user_hash(user)
        reservation.record = ReservationRecord(
            reservation.account, decision.day, max_cost, decision.now + self._life, app.id, payer
        )
        return Admitted(reservation, headers, uses)

    async def settle(self, reservation: Reservation, cost: int) -> None:
        """Ends the reservation at `cost` nano-euro; 0 releases it. Raises no error of Redis.

        Returns when the settlement is written, or when the first attempt has failed and the queue holds it.
        """
        try:
            await self._write(reservation, cost)
        except BackboneUnavailable as error:
            logger.error("settlement.postponed", reservation=reservation.id, error=code_of(error.__cause__))
            self._settle_later(PendingSettlement(reservation, cost))
        except BaseException:
            self._settle_later(PendingSettlement(reservation, cost))
            raise

    async def _write(self, reservation: Reservation, cost: int) -> None:
        settlement = await self._send(self._store, reservation, cost)
        self._metrics.add_settled(settlement.nano_euro)
        self._recent.append((time.monotonic(), reservation, cost))
        # A reservation without a record had no answer to its admission, which most likely never arrived.
        if reservation.record is not None and settlement.outcome in ("recovered", "unknown"):
            self._metrics.lost_reservations.inc()
            event = "settlement.recovered" if settlement.outcome == "recovered" else "settlement.lost"
            logger.error(event, reservation=reservation.id, nano_euro=cost)

    def _send(self, store: Store, reservation: Reservation, cost: int) -> Awaitable[Settlement]:
        return scripts.settle(store, partition_tag(reservation.account), reservation.id, cost, reservation.record)

    async def repeat_recent(self) -> None:
        """Repeats the settlements that a replaced server confirmed. Runs for the life of the process."""
        while True:
            await self._replaced.wait()
            self._replaced.clear()
            since = time.monotonic() - RECENT_SECONDS
            recent = [(reservation, cost) for at, reservation, cost in self._recent if at > since]
            for batch in batched(recent, REPEAT_BATCH):
                await asyncio.gather(*(self._repeat(*settled) for settled in batch))

    async def _repeat(self, reservation: Reservation, cost: int) -> None:
        settlement = await self._send(patient(self._store), reservation, cost)
        if settlement.outcome in ("settled", "recovered"):
            logger.warning("settlement.repeated", reservation=reservation.id, nano_euro=cost)

    def _settle_later(self, settlement: PendingSettlement) -> None:
        # The first settlement of a reservation counts, as it does in Redis.
        if len(self._pending) >= self._max_pending:
            self._pending.popitem(last=False)
        self._pending.setdefault(settlement.reservation.id, settlement)
        self._has_pending.set()

    async def repeat_settlements(self) -> None:
        """Writes the pending settlements. Runs for the life of the process."""
        while True:
            await self._has_pending.wait()
            await self.settle_pending()
            if self._pending:
                self._has_pending.set()
                await asyncio.sleep(self._retry)

    async def settle_pending(self, *, final: bool = False) -> bool:
        """Makes one pass over the pending settlements that are due, oldest first, or with `final` over all of them.

        Returns False if Redis failed some of them.
        """
        self._has_pending.clear()
        now, faults = time.monotonic(), 0
        for key, settlement in list(self._pending.items()):
            if now < settlement.due and not final:
                continue
            self._metrics.settlement_retries.inc()
            try:
                await self._write(settlement.reservation, settlement.cost)
            except BackboneUnavailable:
                # The others may belong to another node of a cluster, so they come first in the next pass.
                if key in self._pending:  # an overflow may have removed it during the attempt
                    self._pending.move_to_end(key)
                faults += 1
                if faults >= MAX_FAULTS:
                    break
            else:
                self._pending.pop(key, None)
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


def _limit_uses(decision: Decision, max_cost: int, limits: Limits) -> LimitUses:
    """Returns the limits in force and their use, which includes the request if it was admitted."""
    used, app_used, user_used = decision.used
    own = max_cost if decision.verdict == "ok" else 0
    return (
        (limits.cap, used + own),
        None if limits.app_cap is None else (limits.app_cap, app_used + own),
        None if limits.user_cap is None else (limits.user_cap, user_used + own),
        (limits.requests, decision.app.count),
        (limits.user_requests, decision.user.count),
    )


def _refusal(decision: Decision, max_cost: int, limits: Limits, headers: Headers) -> ServiceError:
    if decision.verdict == "app":
        # If both windows are full, the next request passes when both have a free slot.
        full: list[Window] = [decision.app]
        if decision.user.count >= limits.user_requests:
            full.append(decision.user)
        wait = max(window.frees_in for window in full)
        retry_after = wait / 1_000_000 or WINDOW_SECONDS  # at a limit of 0, no slot ever becomes free
        return AppRateLimited(retry_after=retry_after, headers=headers)
    if decision.verdict == "user":
        return UserRateLimited(retry_after=decision.user.frees_in / 1_000_000 or WINDOW_SECONDS, headers=headers)
    return _cap_refusal(decision, max_cost, limits)


def _cap_refusal(decision: Decision, max_cost: int, limits: Limits) -> ServiceError:
    error, payer, cap, remedy = {
        "cap": (SpendCapReached, "account", limits.cap, "choose a larger plan"),
        "app_cap": (AppCapReached, "app", limits.app_cap or 0, "ask the app's owner to raise the cap"),
        "user_cap": (UserCapReached, "user", limits.user_cap or 0, "ask the app's owner to raise the cap"),
    }[decision.verdict]
    midnight = 86_400 - decision.now // 1000 % 86_400
    if max_cost > cap:  # it cannot pass on any day, unless the account holder raises a limit
        message = (TOO_DEAR_MESSAGE if cap else ZERO_MESSAGE).format(payer, remedy)
        return error(message, retry_after=None if error is SpendCapReached else midnight)
    if decision.settled + max(max_cost, 1) > cap:
        return error(retry_after=midnight)
    return error(RESERVED_MESSAGE.format(payer), retry_after=min(RESERVED_RETRY_SECONDS, midnight))
