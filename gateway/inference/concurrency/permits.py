"""Permits: the right to one request at the provider, of which all processes together have so many at once.

A process leases permits from Redis in batches (`lease.py`, `lua/inference/lease.lua`) and keeps a few spare ones, so
that a request takes one and gives it back without a round trip. A background task renews the lease, tops up the spare
permits and returns what is not used. One call of the script is under way at a time; the next one gathers what happened
since.

Once permits are scarce, no process keeps spare ones: each freed permit goes back in the next call, and the script
grants it to the account whose turn it is in all processes, within its share. A grant for another process reaches it by
a message, or if that is lost by the answer to its next call.

Where the provider has a quota of requests and tokens in any minute, each process leases a budget of them beside its
permits, in the same calls (`quota.py`, `lua/inference/quota.lua`). A request starts with a permit and its budget, and
waits for both in the same queue. Only answers bring budget, so a message then only says that a call brings something.

Failure policy: without Redis, or while it is slow, a process goes on with the permits it holds, and freed ones go to
its own waiting requests in the order of `fair_queue.py`. It gets no new ones. When its lease ends, no request takes a
permit until Redis answers again. A bound of 0 leaves out everything, Redis included.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from gateway.cancellation import end_if_canceled
from gateway.errors import BackboneUnavailable, ProviderQuotaExhausted, ProviderRefused, ServiceError
from gateway.ids import request_id
from gateway.inference.concurrency import scripts
from gateway.inference.concurrency.fair_queue import ACCOUNT_LIMIT, LIMIT, FairQueue, QueueFull
from gateway.inference.concurrency.lease import SPARE, Lease
from gateway.inference.concurrency.lease_replies import BudgetAnswer, BudgetCall, LeaseAnswer, LeaseCall
from gateway.inference.concurrency.quota import WINDOW, Budget
from gateway.inference.keys import PERMITS_CHANNEL, permits_channel
from gateway.redis.client import Store
from gateway.redis.errors import backbone
from gateway.redis.faults import code_of
from gateway.settings import ProviderRate

logger = structlog.get_logger()

LEASE = 28.0  # seconds: a dead process's permits are free again within 30
RENEWAL = 2.0  # seconds between two calls of a process in which nobody waits
WAITING_RENEWAL = 0.25  # seconds, while requests wait; the script forgets the waiting requests of a silent process
SLOW = 0.03  # seconds without an answer after which freed permits go to the process's own waiting requests
PAUSE = 0.25  # seconds after a call that failed
ASK = 0.25  # seconds that a request may take to ask for a permit where nobody waits
CLOSE = 1.0  # seconds that the last call of a process may take
KEEP = 4  # spare permits of a process that serves nothing
TOP_UP_PAUSE = 0.05  # seconds between two calls for more spare permits
DURATION = 2.0  # seconds that a request is taken to last before one has ended
MEMORY = 1 / 32  # weight of the latest request in the mean duration
UNBOUNDED = 1_000_000  # permits, where only the quota bounds the requests
TOO_MANY_TOKENS = (
    "The request may use {} tokens, more than the model takes of all requests in a minute; "
    "shorten it, or ask for fewer tokens."
)

monotonic = time.monotonic


class Permit:
    """One request's; `Permits.release` takes it back."""

    __slots__ = ("account", "epoch", "held", "sent", "since", "tokens")

    def __init__(self, account: str, since: float, tokens: int = 0, epoch: int = 0) -> None:
        self.account = account
        self.since = since  # monotonic seconds
        self.tokens = tokens  # at most
        self.epoch = epoch  # of the lease
        self.held, self.sent = True, False


class Turn:
    """One waiting request. `await turn.permit()`, or `leave`."""

    __slots__ = ("_future", "_permits", "account", "app", "since", "timer", "tokens", "weight")

    def __init__(self, permits: Permits, account: str, app: str, weight: float, since: float, tokens: int) -> None:
        self._permits, self.account, self.app, self.weight, self.since = permits, account, app, weight, since
        self.tokens = tokens
        self._future: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None

    async def permit(self, every: float | None = None, beat: Callable[[], Awaitable[None]] | None = None) -> Permit:
        """Raises ProviderQuotaExhausted when the turn did not come in time, or what `leave` was called with.

        Calls `beat` whenever so many seconds have passed.
        """
        try:
            while beat is not None and not (await asyncio.wait([self._future], timeout=every))[0]:
                await beat()
            return await self._future
        except asyncio.CancelledError:
            # The permit may have come in the same moment.
            if self._future.done() and not self._future.cancelled() and self._future.exception() is None:
                self._permits.release(self._future.result(), served=False)
            raise
        finally:
            self._permits.forget(self)

    def leave(self, error: Exception) -> None:
        """Gives the turn back at once; `permit` raises the error. Without effect once the permit is there."""
        self._permits.forget(self)
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # it may be that nobody awaits it any more

    def grant(self, permit: Permit) -> bool:
        if self._future.done():
            return False
        self._future.set_result(permit)
        return True


class Permits:
    def __init__(
        self,
        store: Store,
        *,
        bound: int,
        patience: float,
        rate: ProviderRate | None = None,
        observe_wait: Callable[[float], None] = lambda seconds: None,
        lease: float = LEASE,
        renewal: float = RENEWAL,
        window: float = WINDOW,
    ) -> None:
        """`bound`: 0 for none. `patience`: seconds that a request may wait; `lease`, `renewal`, `window`: seconds."""
        self._store, self._observe_wait = store, observe_wait
        self._budget = None if rate is None else Budget(rate, window)
        self._bound = bound or (0 if rate is None else UNBOUNDED)
        self._patience, self._renewal = patience or ASK, renewal
        self.name = request_id()  # of this process, for as long as it lives
        self.in_force = bound
        self._lease = Lease(lease)
        self._queue: FairQueue[Turn] = FairQueue()
        self._used: dict[str, int] = {}  # account -> its permits in use here
        self._changed: set[str] = set()  # accounts of which Redis does not know yet what waits, or is in use
        self._wanted = asyncio.Event()  # a call of the script
        self._due = 0.0  # monotonic seconds: when it is called at the latest
        self._tight = False  # as the last answer or message says
        self._heard_tight = False  # by a message, since the last call began
        self._alone = False  # Redis does not answer, or not in time
        self._answered = False  # the last call; while none ever was, `redis.unavailable` says why
        self._listening = False
        self._cut = False
        self._low = 0  # spare permits below which more are wanted
        self._asked = False  # for spare permits, in the last call
        self._least_spare = 0  # since the last regular renewal
        self._renewal_due = 0.0
        self._top_up_due = 0.0
        self._waiting_elsewhere = 0
        self._duration = DURATION
        self._began = 0.0  # the sum of when the permits in use were taken
        self._moved = 0.0  # monotonic seconds: when a permit was last taken or given back here
        self._quota: BudgetAnswer | None = None  # the last answer's
        self._quota_at = 0.0  # monotonic seconds

    # -- requests --------------------------------------------------------------------------------------------

    def take_now(self, account: str, tokens: int = 0) -> Permit | None:
        """A spare permit, without any round trip; None when the request has to `join` the queue.

        `tokens`: the most that the request may use.
        """
        now, lease, budget = monotonic(), self._lease, self._budget
        if not self._bound:
            lease.used += 1
            return Permit(account, now)
        if self._tight or self._queue or (budget is not None and not budget.fits(tokens)) or not lease.take(now):
            return None
        if lease.spare < self._least_spare:
            self._least_spare = lease.spare
        permit = self._use(account, tokens, now)
        if now >= self._top_up_due and self._is_low():
            self._top_up_due = now + TOP_UP_PAUSE
            self._wanted.set()
        return permit

    def _use(self, account: str, tokens: int, now: float) -> Permit:
        """A permit that has been taken is in use."""
        self._used[account] = self._used.get(account, 0) + 1
        self._began += now
        self._moved = now
        if self._tight:
            self._changed.add(account)
        if self._budget is None:
            return Permit(account, now)
        self._budget.take(tokens, now)
        return Permit(account, now, tokens, self._budget.epoch)

    def join(self, account: str, app: str, weight: float, tokens: int = 0) -> Turn:
        """Raises ProviderQuotaExhausted when the account, or everybody, has too many waiting requests.

        Raises ProviderRefused for one whose turn could never come.
        """
        if self._budget is not None and not self._budget.possible(tokens):
            raise ProviderRefused(TOO_MANY_TOKENS.format(tokens))
        turn = Turn(self, account, app, weight, monotonic(), tokens)
        try:
            if len(self._queue) + self._waiting_elsewhere >= LIMIT:
                raise QueueFull
            # While permits may be free, only the script knows whose requests have to wait.
            self._queue.push(turn, account, app, weight, limited=self._tight or not self._answered)
        except QueueFull:
            raise self._exhausted(account, weight, tokens) from None
        turn.timer = asyncio.get_running_loop().call_later(self._patience, self._expire, turn)
        self._changed.add(account)
        self._serve()
        self._wanted.set()
        return turn

    async def wait(self, account: str, app: str, weight: float, tokens: int = 0) -> Permit:
        """`join`, for a caller that leaves by cancellation alone. Raises ProviderQuotaExhausted."""
        return await self.join(account, app, weight, tokens).permit()

    def release(self, permit: Permit, *, served: bool = True, tokens: int | None = None) -> None:
        """Takes the permit back, once. `served`: the provider was asked, so that its duration counts.

        `tokens`: those that the request has used; None for all that it might have used.
        """
        if not permit.held:
            return
        permit.held = False
        if self._budget is not None:
            self._settle(permit, served, tokens)
        if served:
            self._duration += (monotonic() - permit.since - self._duration) * MEMORY
        if not self._bound:
            self._lease.used -= 1
            return
        self._free(permit)
        if self._tight or self._queue:
            self._serve()

    def mark_sent(self, permit: Permit) -> None:
        """The request is at the provider: from now on it counts for a minute."""
        if self._budget is not None and not permit.sent:
            permit.sent = True
            self._budget.spend_request(permit.epoch)

    def _settle(self, permit: Permit, served: bool, tokens: int | None) -> None:
        """What the request has not used of its budget is spare."""
        assert self._budget is not None
        if served:
            self.mark_sent(permit)
        elif not permit.sent:
            self._budget.return_request(permit.epoch)
            tokens = 0
        self._budget.spend_tokens(permit.epoch, permit.tokens, permit.tokens if tokens is None else tokens)

    def _free(self, permit: Permit) -> None:
        """The permit is spare again."""
        if left := self._used[permit.account] - 1:
            self._used[permit.account] = left
        else:
            del self._used[permit.account]
        self._began -= permit.since
        self._moved = monotonic()
        if self._tight:
            self._changed.add(permit.account)
        self._lease.free()

    def halve_bound(self) -> None:
        """The provider answered 429 without naming a quota: the bound in force is halved."""
        self._cut = True
        self._wanted.set()

    def fail_waiting(self, error: ServiceError, app: str | None = None) -> None:
        """Ends the waiting of all requests, or of one app's."""
        for turn, _, of in self._queue.items():
            if app is None or of == app:
                turn.leave(error)

    def waiting_apps(self) -> set[str]:
        return {app for _, _, app in self._queue.items()}

    @property
    def used(self) -> int:
        return self._lease.used

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def forget(self, turn: Turn) -> None:
        if turn.timer is not None:
            turn.timer.cancel()
        if self._queue.remove(turn):
            self._changed.add(turn.account)
            self._wanted.set()

    def _expire(self, turn: Turn) -> None:
        self.forget(turn)
        turn.leave(self._exhausted(turn.account, turn.weight, turn.tokens))

    def _exhausted(self, account: str, weight: float, tokens: int = 0) -> ProviderQuotaExhausted:
        own = len(self._queue)
        ahead = self._queue.ahead(account, weight)
        # The others' queues are taken to be like this one.
        ahead = ahead * (1 + self._waiting_elsewhere / own) if own else self._waiting_elsewhere
        by_quota, before = 0.0, ahead  # requests that must end first
        if self._budget is not None and self._quota is not None:
            by_quota = self._budget.time_until_free(self._quota, ahead, tokens) - (monotonic() - self._quota_at)
            before -= max(0, self._quota.free_permits)
        return ProviderQuotaExhausted(retry_after=max(by_quota, self._time_until_ended(before + 1)))

    def _time_until_ended(self, requests: float) -> float:
        """Seconds until so many of the provider's requests have ended, as may be expected."""
        if requests <= 0:
            return 0.0
        duration, still = self._duration, 0.0
        if used := sum(self._used.values()):
            # Those under way last at least as long as they have; if none ended for a while, none may for another.
            now = monotonic()
            duration, still = max(duration, now - self._began / used), now - self._moved
        return max(still, requests * duration / max(1, self.in_force))

    # -- permits ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Spare permits go to this process's waiting requests, or if others wait too, back to Redis."""
        if self._tight and not self._alone:
            if self._lease.spare or (self._budget is not None and self._budget.spare):
                self._wanted.set()
            return
        now = monotonic()
        while (turn := self._queue.first()) is not None and self._fits(turn) and self._lease.take(now):
            self._queue.pop()
            self._grant(turn, now)

    def _fits(self, turn: Turn) -> bool:
        return self._budget is None or self._budget.fits(turn.tokens)

    def _grant(self, turn: Turn, now: float) -> None:
        """To a request that has left the queue; the permit is in use."""
        self._changed.add(turn.account)
        permit = self._use(turn.account, turn.tokens, now)
        if turn.grant(permit):
            self._observe_wait(now - turn.since)
        else:  # it has just been canceled
            permit.held = False
            if self._budget is not None:
                self._settle(permit, False, 0)
            self._free(permit)

    def _accept(self, epoch: int, before: int, labels: list[str], now: float) -> None:
        """Each new grant goes to the account it was made for; if none of its requests waits here any more, back."""
        new = self._lease.accept(epoch, before, labels, now)
        if new is None:
            self._wanted.set()  # the answer holds what is missing
            return
        for account in new:
            turn = None if account == SPARE else self._queue.first_of(account)
            if turn is None:
                continue
            if not self._fits(turn):  # Redis took its turn for one with fewer tokens
                self._changed.add(account)
            elif self._lease.take(now):
                self._queue.pop_of(account)
                self._grant(turn, now)
        self._serve()

    def _spare_target(self) -> int:
        return KEEP + self._lease.used // 4

    def _is_low(self) -> bool:
        return self._lease.spare < self._low or (self._budget is not None and self._budget.is_low)

    def _surplus(self, now: float) -> int:
        """Spare permits to return: all once they are scarce, otherwise what was idle since the last renewal."""
        if self._alone:
            return 0  # a call that is lost would lose them
        if self._tight:
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
            monotonic(),
            scarce=leave or self._tight,
            regular=regular,
            wanted=not (self._queue or leave),
            returnable=leave or not self._alone,
        )

    # -- calls -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs as long as the process."""
        if not self._bound:
            await asyncio.Event().wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_calling())
            group.create_task(self._keep_listening())

    async def close(self) -> None:
        """At a clean stop, after `run` has ended: all permits are returned."""
        if self._bound:
            with contextlib.suppress(BackboneUnavailable), backbone():
                async with asyncio.timeout(CLOSE):
                    await self._call(leave=True)

    async def _keep_calling(self) -> None:
        while True:
            end_if_canceled()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._due - monotonic())):
                    await self._wanted.wait()
            self._wanted.clear()
            slow = asyncio.get_running_loop().call_later(SLOW, self._go_alone)
            try:
                answer = await self._call()
            except BackboneUnavailable as error:
                slow.cancel()
                if self._answered:
                    logger.warning("permits.unanswered", error=code_of(error.__cause__), held=self.used)
                self._answered = False
                self._go_alone()
                for account in self._queue.accounts():
                    self._refuse_newest(account, self._queue.demand(account)[1] - ACCOUNT_LIMIT)
                await asyncio.sleep(PAUSE)
                continue
            slow.cancel()
            self._alone, self._answered = False, True
            self._schedule(answer)
            self._serve()

    async def _call(self, *, leave: bool = False) -> LeaseAnswer | None:
        """One call of the script. Raises BackboneUnavailable."""
        now, lease = monotonic(), self._lease
        regular = now >= self._renewal_due
        call = lease.call(now, self._surplus(now), len(self._queue))
        budget = self._call_budget(regular=regular, leave=leave)
        if lease.fresh:
            self._tell_all()
        changed, self._changed = self._changed, set()
        cut, self._cut = self._cut, False
        self._heard_tight = False
        demand = {account: self._demand(account) for account in changed}
        want = 0 if self._queue or leave else max(0, self._spare_target() - lease.spare)
        self._asked = want > 0 or (budget is not None and budget.wants)
        try:
            answer = await scripts.lease(
                self._store,
                self.name,
                call,
                demand,
                want=want,
                cut=cut,
                leave=leave,
                bound=self._bound,
                length=int(self._lease.length * 1000),
                budget=budget,
            )
        except BaseException:
            # The answer that was lost may have said that Redis forgot who waits here.
            self._changed |= changed
            self._tell_all()
            self._cut = self._cut or cut
            raise
        if answer is not None and not leave:
            self._apply(call, answer)
        return answer

    def _demand(self, account: str) -> tuple[float, int, int, int]:
        """The account's weight, waiting requests, permits in use, and the tokens that the next request needs."""
        turn = None if self._budget is None else self._queue.first_of(account)
        return (*self._queue.demand(account), self._used.get(account, 0), 0 if turn is None else turn.tokens)

    def _apply(self, call: LeaseCall, answer: LeaseAnswer) -> None:
        now, first = monotonic(), self._lease.fresh
        if not self._lease.renew(call, now):
            return
        # A message may overtake the answer that was written before it.
        self._set_tight(answer.tight or self._heard_tight)
        self.in_force = answer.in_force if self._bound < UNBOUNDED else 0
        self._waiting_elsewhere = max(0, answer.waiting - call.waiting)
        self._low = self._spare_target() // 2
        if not answer.known and not first:
            self._tell_all()
            self._wanted.set()
        for account, excess in answer.excess.items():
            self._refuse_newest(account, excess)
        if self._budget is not None and answer.budget is not None:
            self._budget.accept(answer.budget)
            self._quota, self._quota_at = answer.budget, now
        self._accept(call.epoch, answer.before, answer.labels, now)

    def _set_tight(self, tight: bool) -> None:
        if tight and not self._tight:
            self._tight = True
            self._tell_all()
            self._wanted.set()
        self._tight = tight

    def _tell_all(self) -> None:
        """The next call says all that Redis knows of this process's accounts."""
        self._changed.update(self._queue.accounts(), self._used if self._tight else ())

    def _refuse_newest(self, account: str, count: int) -> None:
        """The account has its limit of waiting requests over all processes."""
        turns = sorted((turn for turn, of, _ in self._queue.items() if of == account), key=lambda turn: turn.since)
        for turn in turns[-count:] if count > 0 else ():
            turn.leave(self._exhausted(account, turn.weight, turn.tokens))

    def _schedule(self, answer: LeaseAnswer | None) -> None:
        """The next call, unless one is wanted before."""
        delay = self._renewal
        if self._queue:
            delay = min(delay, WAITING_RENEWAL if self._listening else SLOW)
            if answer is not None and answer.frees:
                delay = min(delay, answer.frees)
        elif not self._tight and not self._asked and self._is_low():
            delay = TOP_UP_PAUSE
        self._due = monotonic() + delay

    def _go_alone(self) -> None:
        self._alone = True
        self._serve()

    # -- messages --------------------------------------------------------------------------------------------

    async def _keep_listening(self) -> None:
        while True:
            end_if_canceled()
            try:
                async with self._store.subscription(PERMITS_CHANNEL, permits_channel(self.name)) as subscription:
                    await self._listen(subscription)
            except BackboneUnavailable as error:
                if self._listening:
                    logger.warning("permits.unsubscribed", error=code_of(error.__cause__))
            finally:
                self._listening = False
            await asyncio.sleep(PAUSE)

    async def _listen(self, subscription: Any) -> None:
        """Raises when the connection is lost or does not answer."""
        unanswered = 0
        while True:
            end_if_canceled()
            message = await subscription.get_message(timeout=1.0)
            if message is None:
                if unanswered == 2:
                    raise TimeoutError("the subscription does not answer")
                unanswered += 1
                await subscription.ping()
                continue
            unanswered = 0
            if message["type"] == "subscribe":
                self._listening = True
                self._wanted.set()  # what was granted before is not heard
            elif message["type"] == "message":
                self._hear(message["channel"], message["data"])

    def _hear(self, channel: str, text: str) -> None:
        if channel == PERMITS_CHANNEL:
            if text != self.name:
                self._heard_tight = True
                self._set_tight(True)
                self._serve()
            return
        if self._budget is not None:
            self._wanted.set()
            return
        epoch, before, *labels = text.split(" ")
        self._accept(int(epoch), int(before), labels, monotonic())
