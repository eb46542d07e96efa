"""Permits: a permit is the right to one request at a provider. All processes together share a fixed number of them.

A process leases permits from Redis in batches (`lease.py`, `lua/inference/lease.lua`) and keeps a few spare ones, so
that a request takes and releases one without a round trip. A background task renews the lease, tops up the spare
permits and returns unused ones. It makes one call of the script at a time; the next call collects all that has happened
since.

While permits are scarce, no process keeps spare ones. Each freed permit goes back with the next call, and the script
grants it to the next account in the queue of all processes, within that account's share. Another process learns of its
grant by a message or, if that is lost, by the answer to its next call.

A request that finds no spare permit waits (`waiting.py`), perhaps for several providers at once.

If the provider has a quota of requests and tokens in any minute, each process leases a budget of them with its permits,
in the same calls (`quota.py`, `lua/inference/quota.lua`). A request needs a permit and its budget to start, and waits
for both in the same queue. Budget arrives only with answers, so a message then only triggers a call.

Failure policy: while Redis is away or slow, a process keeps using the permits it holds, and freed ones go to its own
waiting requests in the order of `fair_queue.py`. It gets no new ones. Once its lease has ended, no request takes a
permit until Redis answers again. A limit of 0 turns all of this off: Redis is not called.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable

import structlog

from gateway.cancellation import end_if_canceled
from gateway.errors import BackboneUnavailable, ProviderQuotaExhausted, ProviderRefused
from gateway.ids import request_id
from gateway.inference.concurrency import scripts
from gateway.inference.concurrency.fair_queue import ACCOUNT_LIMIT, QUEUE_LIMIT, FairQueue, QueueFull
from gateway.inference.concurrency.lease import SPARE, BudgetAnswer, BudgetCall, LeaseAnswer, LeaseCall, PermitLease
from gateway.inference.concurrency.quota import WINDOW_SECONDS, Budget
from gateway.inference.concurrency.waiting import Permit, Waiter
from gateway.keys import permits_channel
from gateway.loops import until_set
from gateway.redis.client import Store
from gateway.redis.errors import code_of
from gateway.redis.listener import Listener
from gateway.settings import DEFAULT_PROVIDER, ProviderRate

logger = structlog.get_logger()

LEASE_SECONDS = 28.0  # a dead process's permits are free again within 30 seconds
RENEWAL_SECONDS = 2.0  # between two calls while no request waits here
WAITING_RENEWAL_SECONDS = 0.25  # while requests wait; the script forgets the waiting requests of a silent process
SLOW_CALL_SECONDS = 0.03  # without an answer, after which freed permits go to the process's own waiting requests
RETRY_SECONDS = 0.25  # after a call that failed
CLOSE_SECONDS = 1.0  # for the last call of a process
MIN_SPARE = 4  # spare permits of a process that serves nothing
TOP_UP_SECONDS = 0.05  # between two calls for more spare permits
INITIAL_DURATION_SECONDS = 2.0  # the assumed duration of a request, until one has ended
EWMA_WEIGHT = 1 / 32  # of the latest request in the mean duration
UNLIMITED = 1_000_000  # permits, if only the quota limits the requests
TOO_MANY_TOKENS = (
    "The request may use {} tokens, more than the model accepts from all requests in a minute; "
    "shorten it, or ask for fewer tokens."
)


class RedisState(enum.Enum):
    UNKNOWN = "no call has been answered yet"
    ANSWERS = "the last call was answered"
    SLOW = "the current call has had no answer for SLOW_CALL_SECONDS"
    AWAY = "the last call failed"


UNKNOWN, ANSWERS, SLOW, AWAY = RedisState


class Permits:
    def __init__(
        self,
        store: Store,
        *,
        provider: str = DEFAULT_PROVIDER,
        limit: int,
        rate: ProviderRate | None = None,
        observe_wait: Callable[[float], None] = lambda seconds: None,
        lease: float = LEASE_SECONDS,
        renewal: float = RENEWAL_SECONDS,
        window: float = WINDOW_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`provider`: its name. `limit`: permits of all processes, 0 for no limit.

        `lease`, `renewal` and `window` are in seconds. `clock` returns monotonic seconds.
        """
        self._store, self._observe_wait, self._clock = store, observe_wait, clock
        self.provider = provider
        self._budget = None if rate is None else Budget(rate, window)
        self._limit = limit or (0 if rate is None else UNLIMITED)
        self._renewal = renewal
        self.name = request_id()  # of this process, for as long as it lives
        self.in_force = limit
        self._lease = PermitLease(lease)
        self._queue: FairQueue[Waiter] = FairQueue()
        self._used: dict[str, int] = {}  # account -> its permits in use here
        self._changed: set[str] = set()  # accounts whose waiting requests or permits in use Redis does not know yet
        self._wanted = asyncio.Event()  # a call of the script
        self._due = 0.0  # monotonic seconds: when it is called at the latest
        self._scarce = False  # according to the last answer or message
        self._heard_scarce = False  # from a message, since the last call began
        self.redis_state = UNKNOWN
        self._listening = False
        self._listener = Listener(
            store,
            permits_channel(provider),
            permits_channel(provider, self.name),
            on_subscribe=self._start_listening,
            on_message=self._take_message,
            on_loss=self._stop_listening,
            loss_event="permits.unsubscribed",
        )
        self._cut = False
        self._low = 0  # spare permits below which more are wanted
        self._asked = False  # for spare permits, in the last call
        self._least_spare = 0  # since the last regular renewal
        self._renewal_due = 0.0
        self._top_up_due = 0.0
        self._waiting_elsewhere = 0
        self._duration = INITIAL_DURATION_SECONDS
        self._began = 0.0  # the sum of the times at which the permits in use were taken
        self._moved = 0.0  # monotonic seconds: when a permit was last taken or released here
        self._quota: BudgetAnswer | None = None  # of the last answer
        self._quota_at = 0.0  # monotonic seconds

    # -- requests --------------------------------------------------------------------------------------------

    def take_now(self, account: str, tokens: int = 0) -> Permit | None:
        """Takes a spare permit without a round trip. Returns None if the request has to `join` the queue.

        `tokens` is the most that the request may use.
        """
        now, lease, budget = self._clock(), self._lease, self._budget
        if not self._limit:
            lease.used += 1
            return Permit(self, account, now)
        if self._scarce or self._queue or (budget is not None and not budget.fits(tokens)) or not lease.take(now):
            return None
        if lease.spare < self._least_spare:
            self._least_spare = lease.spare
        permit = self._start_use(account, tokens, now)
        if now >= self._top_up_due and self._is_low():
            self._top_up_due = now + TOP_UP_SECONDS
            self._wanted.set()
        return permit

    def _start_use(self, account: str, tokens: int, now: float) -> Permit:
        """Records that a permit taken from the lease is in use."""
        self._used[account] = self._used.get(account, 0) + 1
        self._began += now
        self._moved = now
        if self._scarce:
            self._changed.add(account)
        if self._budget is None:
            return Permit(self, account, now)
        self._budget.take(tokens, now)
        return Permit(self, account, now, tokens, self._budget.epoch)

    def join(self, waiter: Waiter) -> None:
        """Adds a request to the queue.

        Raises ProviderQuotaExhausted if the account or the queue has too many waiting requests, and ProviderRefused if
        the request could never start.
        """
        account, weight = waiter.account, waiter.weight
        if not self._limit and (permit := self.take_now(account)) is not None:
            waiter.grant(permit)
            return
        if self._budget is not None and not self._budget.is_possible(waiter.tokens):
            raise ProviderRefused(TOO_MANY_TOKENS.format(waiter.tokens))
        limited = self._scarce or self.redis_state in (UNKNOWN, AWAY)
        try:
            if len(self._queue) + self._waiting_elsewhere >= QUEUE_LIMIT:
                raise QueueFull
            # While permits may be free, only the script knows which requests have to wait.
            self._queue.push(waiter, account, waiter.app, weight, limited=limited)
        except QueueFull:
            raise self.refusal_of(waiter) from None
        self._changed.add(account)
        self._serve()
        self._wanted.set()

    def release(self, permit: Permit, *, served: bool = True, tokens: int | None = None) -> None:
        """Takes the permit back, once. If `served`, the request reached the provider, and its duration counts.

        `tokens` is the number that the request has used; None means the most that it might have used.
        """
        if not permit.held:
            return
        permit.held = False
        now = self._clock()
        if self._budget is not None:
            self._settle(permit, served, tokens)
        if served:
            self._duration += (now - permit.since - self._duration) * EWMA_WEIGHT
        if not self._limit:
            self._lease.used -= 1
            return
        self._end_use(permit, now)
        if self._scarce or self._queue:
            self._serve()

    def mark_sent(self, permit: Permit) -> None:
        """Records that the request was sent. It counts for a minute from now on."""
        if self._budget is not None and not permit.sent:
            permit.sent = True
            self._budget.spend_request(permit.epoch)

    def _settle(self, permit: Permit, served: bool, tokens: int | None) -> None:
        """Makes the part of the budget that the request has not used spare again."""
        assert self._budget is not None
        if served:
            self.mark_sent(permit)
        elif not permit.sent:
            self._budget.return_request(permit.epoch)
            tokens = 0
        self._budget.spend_tokens(permit.epoch, permit.tokens, permit.tokens if tokens is None else tokens)

    def _end_use(self, permit: Permit, now: float) -> None:
        """Makes the permit spare again."""
        if left := self._used[permit.account] - 1:
            self._used[permit.account] = left
        else:
            del self._used[permit.account]
        self._began -= permit.since
        self._moved = now
        if self._scarce:
            self._changed.add(permit.account)
        self._lease.release()

    def halve_limit(self) -> None:
        """Halves the limit in force, because the provider answered 429 without naming a quota."""
        self._cut = True
        self._wanted.set()

    @property
    def used(self) -> int:
        return self._lease.used

    @property
    def spare(self) -> int:
        return self._lease.spare

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def remove(self, waiter: Waiter) -> None:
        if self._queue.remove(waiter):
            self._changed.add(waiter.account)
            self._wanted.set()

    def refusal_of(self, waiter: Waiter) -> ProviderQuotaExhausted:
        """Returns the refusal of one more request like this one, with the estimated time until it could start."""
        own = len(self._queue)
        ahead = self._queue.count_ahead(waiter.account, waiter.weight)
        # The queues of the other processes are assumed to be like this one.
        ahead = ahead * (1 + self._waiting_elsewhere / own) if own else self._waiting_elsewhere
        by_quota, before = 0.0, ahead  # requests that must end first
        if self._budget is not None and self._quota is not None:
            by_quota = self._budget.time_until_free(self._quota, ahead, waiter.tokens)
            by_quota -= self._clock() - self._quota_at
            before -= max(0, self._quota.free_permits)
        return ProviderQuotaExhausted(retry_after=max(by_quota, self._time_until_ended(before + 1)))

    def _time_until_ended(self, requests: float) -> float:
        """Estimates the seconds until so many of the provider's requests have ended."""
        if requests <= 0:
            return 0.0
        duration, still = self._duration, 0.0
        if used := sum(self._used.values()):
            # Running requests last at least as long as they have so far. If none has ended for some time, the next one
            # may take as long again.
            now = self._clock()
            duration, still = max(duration, now - self._began / used), now - self._moved
        return max(still, requests * duration / max(1, self.in_force))

    # -- permits ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Grants spare permits to this process's waiting requests or, if they are scarce, returns them to Redis."""
        if self._scarce and not self._is_alone():
            if self._lease.spare or (self._budget is not None and self._budget.spare):
                self._wanted.set()
            return
        now = self._clock()
        while (waiter := self._queue.first()) is not None and self._fits(waiter) and self._lease.take(now):
            self._queue.pop()
            self._grant(waiter, now)

    def _is_alone(self) -> bool:
        """Returns whether the process serves its own waiting requests because Redis does not answer in time."""
        return self.redis_state is SLOW or self.redis_state is AWAY

    def _fits(self, waiter: Waiter) -> bool:
        return self._budget is None or self._budget.fits(waiter.tokens)

    def _grant(self, waiter: Waiter, now: float) -> None:
        """Gives a permit that was taken from the lease to a request that has left the queue."""
        self._changed.add(waiter.account)
        permit = self._start_use(waiter.account, waiter.tokens, now)
        if waiter.grant(permit):
            self._observe_wait(now - waiter.since)
        else:  # it has just been canceled
            permit.held = False
            if self._budget is not None:
                self._settle(permit, False, 0)
            self._end_use(permit, now)

    def _accept(self, epoch: int, before: int, labels: list[str], now: float) -> None:
        """Passes each new grant to its account. If none of the account's requests waits here, the permit goes back."""
        new = self._lease.accept(epoch, before, labels, now)
        if new is None:
            self._wanted.set()  # the next answer contains the missing grants
            return
        for account in new:
            waiter = None if account == SPARE else self._queue.first_of(account)
            if waiter is None:
                continue
            if not self._fits(waiter):  # Redis granted budget for a request with fewer tokens
                self._changed.add(account)
            elif self._lease.take(now):
                self._queue.pop_of(account)
                self._grant(waiter, now)
        self._serve()

    def _spare_target(self) -> int:
        return MIN_SPARE + self._lease.used // 4

    def _is_low(self) -> bool:
        return self._lease.spare < self._low or (self._budget is not None and self._budget.is_low)

    def _surplus(self, now: float) -> int:
        """Returns the number of spare permits to give back: all while they are scarce, otherwise the idle ones.

        Idle are those that were spare all the time since the last regular renewal.
        """
        if self._is_alone():
            return 0  # if the call were lost, the permits would be lost with it
        if self._scarce:
            return self._lease.spare
        if now < self._renewal_due:
            return 0
        surplus = max(0, min(self._least_spare, self._lease.spare) - self._spare_target())
        self._least_spare = self._lease.spare - surplus
        self._renewal_due = now + self._renewal
        return surplus

    def _call_budget(self, *, regular: bool, leave: bool) -> BudgetCall | None:
        if (budget := self._budget) is None:
            return None
        budget.begin(self._lease.epoch)
        return budget.call(
            self._clock(),
            scarce=leave or self._scarce,
            regular=regular,
            wanted=not (self._queue or leave),
            returnable=leave or not self._is_alone(),
        )

    # -- calls -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Renews the lease and listens to messages, for the life of the process."""
        if not self._limit:
            await asyncio.Event().wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_calling())
            group.create_task(self._listener.run())

    async def close(self) -> None:
        """Returns all permits at a clean stop, after `run` has ended."""
        if self._limit:
            with contextlib.suppress(BackboneUnavailable, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._call(leave=True)

    async def _keep_calling(self) -> None:
        while True:
            end_if_canceled()
            await until_set(self._wanted, max(0.0, self._due - self._clock()))
            self._wanted.clear()
            slow = asyncio.get_running_loop().call_later(SLOW_CALL_SECONDS, self._serve_alone)
            try:
                answer = await self._call()
            except BackboneUnavailable as error:
                slow.cancel()
                if self.redis_state not in (UNKNOWN, AWAY):  # while Redis never answered, `redis.unavailable` says why
                    logger.warning("permits.unanswered", error=code_of(error.__cause__), held=self.used)
                self.redis_state = AWAY
                self._serve()
                for account in self._queue.accounts():
                    self._refuse_newest(account, self._queue.demand(account)[1] - ACCOUNT_LIMIT)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            slow.cancel()
            self.redis_state = ANSWERS
            self._schedule(answer)
            self._serve()

    async def _call(self, *, leave: bool = False) -> LeaseAnswer | None:
        """Calls the script once. Raises BackboneUnavailable."""
        now, lease = self._clock(), self._lease
        regular = now >= self._renewal_due
        call = lease.call(now, self._surplus(now), len(self._queue))
        budget = self._call_budget(regular=regular, leave=leave)
        if lease.is_new:
            self._report_all()
        changed, self._changed = self._changed, set()
        cut, self._cut = self._cut, False
        self._heard_scarce = False
        demand = {account: self._demand(account) for account in changed}
        want = 0 if self._queue or leave else max(0, self._spare_target() - lease.spare)
        self._asked = want > 0 or (budget is not None and budget.wants)
        try:
            answer = await scripts.lease(
                self._store,
                self.provider,
                self.name,
                call,
                demand,
                want=want,
                cut=cut,
                leave=leave,
                limit=self._limit,
                length=int(self._lease.length * 1000),
                budget=budget,
            )
        except BaseException:
            # The lost answer may have said that Redis has forgotten the waiting requests.
            self._changed |= changed
            self._report_all()
            self._cut = self._cut or cut
            raise
        if answer is not None and not leave:
            self._apply(call, answer)
        return answer

    def _demand(self, account: str) -> tuple[float, int, int, int]:
        """Returns the account's weight, waiting requests, permits in use, and the tokens of its next request."""
        waiter = None if self._budget is None else self._queue.first_of(account)
        return (*self._queue.demand(account), self._used.get(account, 0), 0 if waiter is None else waiter.tokens)

    def _apply(self, call: LeaseCall, answer: LeaseAnswer) -> None:
        now, first = self._clock(), self._lease.is_new
        if not self._lease.renew(call, now):
            return
        # A message may overtake the answer that was written before it.
        self._set_scarce(answer.scarce or self._heard_scarce)
        self.in_force = answer.in_force if self._limit < UNLIMITED else 0
        self._waiting_elsewhere = max(0, answer.waiting - call.waiting)
        self._low = self._spare_target() // 2
        if not answer.known and not first:
            self._report_all()
            self._wanted.set()
        for account, excess in answer.excess.items():
            self._refuse_newest(account, excess)
        if self._budget is not None and answer.budget is not None:
            self._budget.accept(answer.budget)
            self._quota, self._quota_at = answer.budget, now
        self._accept(call.epoch, answer.before, answer.labels, now)

    def _set_scarce(self, scarce: bool) -> None:
        if scarce and not self._scarce:
            self._scarce = True
            self._report_all()
            self._wanted.set()
        self._scarce = scarce

    def _report_all(self) -> None:
        """Lets the next call report every account of this process that Redis keeps a record of."""
        self._changed.update(self._queue.accounts(), self._used if self._scarce else ())

    def _refuse_newest(self, account: str, count: int) -> None:
        """Refuses the account's newest waiting requests, because over all processes it has too many."""
        own = (waiter for waiter, of, _ in self._queue.items() if of == account)
        waiters = sorted(own, key=lambda waiter: waiter.since)
        for waiter in waiters[-count:] if count > 0 else ():
            waiter.refuse(self, self.refusal_of(waiter))

    def _schedule(self, answer: LeaseAnswer | None) -> None:
        """Sets the time of the next call, which may be wanted earlier."""
        delay = self._renewal
        if self._queue:
            delay = min(delay, WAITING_RENEWAL_SECONDS if self._listening else SLOW_CALL_SECONDS)
            if answer is not None and answer.frees_in:
                delay = min(delay, answer.frees_in)
        elif not self._scarce and not self._asked and self._is_low():
            delay = TOP_UP_SECONDS
        self._due = self._clock() + delay

    def _serve_alone(self) -> None:
        """Serves this process's own requests while the call has no answer."""
        self.redis_state = SLOW if self.redis_state is ANSWERS else AWAY
        self._serve()

    # -- messages --------------------------------------------------------------------------------------------

    def _start_listening(self) -> None:
        self._listening = True
        self._wanted.set()  # messages about earlier grants are lost: the next answer names these grants

    def _stop_listening(self) -> None:
        self._listening = False

    def _take_message(self, channel: str, text: str) -> None:
        if channel == permits_channel(self.provider):
            if text != self.name:
                self._heard_scarce = True
                self._set_scarce(True)
                self._serve()
            return
        if self._budget is not None:
            self._wanted.set()
            return
        epoch, before, *labels = text.split(" ")
        self._accept(int(epoch), int(before), labels, self._clock())
