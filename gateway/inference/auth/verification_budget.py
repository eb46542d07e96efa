"""Limits the work that tokens may cause, so that one app's flood of bad tokens hardly affects other apps.

To verify a token keeps the event loop busy for 50 µs to about a millisecond, depending on the app's keys. Time is
therefore limited, not the number of tokens. Each app, and each account for all its apps, has a budget of verification
time that refills at a constant rate. A token that proves valid costs a quarter of its time. If an app or its account
has used up its budget, its tokens are refused unread. Tokens that were verified before cost nothing and always pass.

The event loop checks one signature of each account at a time, and does other work between two of them. Many tokens that
arrive together therefore do not delay other accounts.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import structlog

from gateway.accounts.records import App
from gateway.errors import TokensLimited

logger = structlog.get_logger()

APP_RATE = 0.1  # seconds of work per second
ACCOUNT_RATE = 0.15
BURST_SECONDS = 0.25  # of refill that a budget holds at most
VALID_WEIGHT = 0.25  # of the work for a token that proves valid
BACKEND_CALL_SECONDS = 0.001  # of work that a call to an app's backend is charged with
MAX_WAITING = 500  # tokens of one account
MAX_BUDGETS = 20_000
LOG_SECONDS = 10.0  # between two log lines about one app


class TenantBudget:
    """The remaining seconds of work; negative if the last work took longer than the remaining time."""

    __slots__ = ("_at", "_left", "_rate", "logged_at")

    def __init__(self, rate: float, now: float) -> None:
        self._rate, self._left, self._at = rate, rate * BURST_SECONDS, now
        self.logged_at = float("-inf")

    def charge(self, work: float, now: float) -> None:
        left = self._left + (now - self._at) * self._rate - work
        self._left, self._at = min(left, self._rate * BURST_SECONDS), now

    def wait(self, now: float) -> float:
        """Returns the seconds until some time is left; 0 if there is some now."""
        return max(0.0, -self._left / self._rate - (now - self._at))


class VerificationLimits:
    def __init__(
        self,
        requests_per_minute: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        thread_clock: Callable[[], float] = time.thread_time,
        max_waiting: int = MAX_WAITING,
        max_budgets: int = MAX_BUDGETS,
    ) -> None:
        """`requests_per_minute`: of an app. `clock` and `thread_clock` return seconds; the latter counts only work.

        `max_waiting`: tokens of one account.
        """
        self._requests_per_minute, self._max_waiting, self._max_budgets = requests_per_minute, max_waiting, max_budgets
        self.clock, self.thread_clock = clock, thread_clock
        self._budgets: OrderedDict[tuple[str, str], TenantBudget] = OrderedDict()
        # By account. An account with an entry has used its slot in this round of the event loop.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def begin(self, app: App) -> Verification:
        """Waits for a slot of the account. Raises TokensLimited if the app or its account has no time left."""
        verification = Verification(self, app)
        await verification.acquire()
        return verification

    def budgets_of(self, app: App) -> tuple[TenantBudget, TenantBudget]:
        """Returns the app's budget and its account's."""
        return self._budget((app.account, app.id), APP_RATE), self._budget((app.account, ""), ACCOUNT_RATE)

    def _budget(self, key: tuple[str, str], rate: float) -> TenantBudget:
        budget = self._budgets.get(key)
        if budget is None:
            while len(self._budgets) >= self._max_budgets:
                self._budgets.popitem(last=False)
            budget = self._budgets[key] = TenantBudget(rate, self.clock())
        else:
            self._budgets.move_to_end(key)
        return budget

    async def wait_for_slot(self, app: App, *, first: bool = False) -> bool:
        """Waits for a slot: each account has one in each round of the event loop. `first` goes before other waiters.

        Returns whether other work ran in between.
        """
        loop, account = asyncio.get_running_loop(), app.account
        queue = self._waiting.get(account)
        if queue is None:
            self._waiting[account] = deque()
            loop.call_soon(self._free_slot, account)
            return False
        if len(queue) >= self._max_waiting and not first:
            raise self.refusal(1.0)
        waiter: asyncio.Future[None] = loop.create_future()
        if first:
            queue.appendleft(waiter)
        else:
            queue.append(waiter)
        await waiter
        return True

    def _free_slot(self, account: str) -> None:
        queue = self._waiting[account]
        while queue:
            waiter = queue.popleft()
            if not waiter.done():  # else its request was canceled
                waiter.set_result(None)
                asyncio.get_running_loop().call_soon(self._free_slot, account)
                return
        del self._waiting[account]

    def refusal(self, wait: float) -> TokensLimited:
        error = TokensLimited(retry_after=wait)
        error.headers = [
            (b"ratelimit-limit", b"%d" % self._requests_per_minute),
            (b"ratelimit-remaining", b"0"),
            (b"ratelimit-reset", b"%d" % (error.retry_after or 1)),
        ]
        return error


class Verification:
    """The verification of one token. Its time runs from each slot to the next pause, slot or end."""

    __slots__ = ("_account_budget", "_app", "_app_budget", "_began", "_limits", "_spent")

    def __init__(self, limits: VerificationLimits, app: App) -> None:
        self._limits, self._app = limits, app
        self._app_budget, self._account_budget = limits.budgets_of(app)
        self._began: float | None = None
        self._spent = 0.0

    async def acquire(self) -> None:
        """Waits for a slot. Raises TokensLimited."""
        self.pause()
        self._check()
        if await self._limits.wait_for_slot(self._app):
            self._check()  # earlier tokens may have used up the time
        self._began = self._limits.thread_clock()

    async def acquire_next(self) -> None:
        """Waits for another slot, to try another key.

        It does not check the budgets: otherwise a flood would lock out the tokens of an app's last key.
        """
        self.pause()
        await self._limits.wait_for_slot(self._app, first=True)
        self._began = self._limits.thread_clock()

    def pause(self) -> None:
        """Stops the time before a wait that does not keep the process busy."""
        if self._began is not None:
            self.charge(self._limits.thread_clock() - self._began)
            self._began = None

    def charge(self, seconds: float) -> None:
        self._spent += seconds
        self._charge_budgets(seconds)

    def finish(self, *, valid: bool) -> None:
        if not valid:
            self.pause()
            return
        this_slot = 0.0 if self._began is None else self._limits.thread_clock() - self._began
        # The earlier slots were charged in full. All but VALID_WEIGHT of that is given back.
        self._charge_budgets(this_slot * VALID_WEIGHT - self._spent * (1 - VALID_WEIGHT))

    def _charge_budgets(self, seconds: float) -> None:
        now = self._limits.clock()
        self._app_budget.charge(seconds, now)
        self._account_budget.charge(seconds, now)

    def _check(self) -> None:
        """Raises TokensLimited."""
        now = self._limits.clock()
        wait = max(self._app_budget.wait(now), self._account_budget.wait(now))
        if wait > 0:
            self._log(now)
            raise self._limits.refusal(wait)

    def _log(self, now: float) -> None:
        if now - self._app_budget.logged_at >= LOG_SECONDS:
            self._app_budget.logged_at = now
            logger.warning("tokens.limited", app=self._app.id, account=self._app.account)
