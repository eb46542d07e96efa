"""Limits the work that tokens may cause, so that one app's flood of bad tokens costs the other apps next to nothing.

Verifying a token takes the event loop from 50 µs to about a millisecond, depending on the app's keys. Therefore time
is limited, not tokens: each app, and each account over its apps, has a budget of the time that verifications took,
refilled at a constant rate. A token that proves valid costs a quarter. A token whose app or account has nothing left is
refused before anything of it is read. Tokens that were verified before cost nothing and always pass.

Of each account, one signature is checked at a time, and other work of the process runs between two of them: many
tokens that arrive together do not hold up other accounts.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque

import structlog

from gateway.accounts.records import App
from gateway.errors import AppRateLimited

logger = structlog.get_logger()

APP_RATE = 0.1  # seconds of work per second
ACCOUNT_RATE = 0.15
BURST = 0.25  # seconds of refill that a budget holds at most
VALID_WEIGHT = 0.25  # of the work for a token that proves valid
CALL = 0.001  # seconds of work that a call to an app's backend is charged with
WAITING = 500  # tokens of one account that wait for their turn
BUDGETS = 20_000
LOG_INTERVAL = 10.0  # seconds between log lines about one app
MESSAGE = "Too many tokens of this app were invalid just now; try again after the time in Retry-After."


class Budget:
    """Seconds of work that are left; negative when the last work took longer than that."""

    __slots__ = ("_at", "_left", "_rate", "logged_at")

    def __init__(self, rate: float, now: float) -> None:
        self._rate, self._left, self._at = rate, rate * BURST, now
        self.logged_at = float("-inf")

    def charge(self, work: float, now: float) -> None:
        left = self._left + (now - self._at) * self._rate - work
        self._left, self._at = min(left, self._rate * BURST), now

    def wait(self, now: float) -> float:
        """Seconds until there is something left; 0 if there is now."""
        return max(0.0, -self._left / self._rate - (now - self._at))


class VerificationLimits:
    def __init__(self, requests_per_minute: int) -> None:
        self._requests_per_minute = requests_per_minute  # of an app
        self._budgets: OrderedDict[tuple[str, str], Budget] = OrderedDict()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by account; an entry means that one is at work

    async def begin(self, app: App) -> Work:
        """Waits for the account's turn. Raises AppRateLimited when the app or its account has no time left."""
        work = Work(self, app)
        await work.acquire()
        return work

    def budgets_of(self, app: App) -> tuple[Budget, Budget]:
        """The app's, and its account's."""
        return self._budget((app.account, app.id), APP_RATE), self._budget((app.account, ""), ACCOUNT_RATE)

    def _budget(self, key: tuple[str, str], rate: float) -> Budget:
        budget = self._budgets.get(key)
        if budget is None:
            while len(self._budgets) >= BUDGETS:
                self._budgets.popitem(last=False)
            budget = self._budgets[key] = Budget(rate, time.monotonic())
        else:
            self._budgets.move_to_end(key)
        return budget

    async def wait_for_turn(self, app: App, *, first: bool = False) -> bool:
        """At most one turn of an account in each round of the event loop. `first`: before the others that wait.

        Returns whether anything else ran in between.
        """
        loop, account = asyncio.get_running_loop(), app.account
        queue = self._waiting.get(account)
        if queue is None:
            self._waiting[account] = deque()
            loop.call_soon(self._give_next_turn, account)
            return False
        if len(queue) >= WAITING and not first:
            raise self.refusal(1.0)
        turn: asyncio.Future[None] = loop.create_future()
        if first:
            queue.appendleft(turn)
        else:
            queue.append(turn)
        await turn
        return True

    def _give_next_turn(self, account: str) -> None:
        queue = self._waiting[account]
        while queue:
            turn = queue.popleft()
            if not turn.done():  # else its request was canceled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._give_next_turn, account)
                return
        del self._waiting[account]

    def refusal(self, wait: float) -> AppRateLimited:
        error = AppRateLimited(MESSAGE, retry_after=wait)
        error.headers = [
            (b"ratelimit-limit", b"%d" % self._requests_per_minute),
            (b"ratelimit-remaining", b"0"),
            (b"ratelimit-reset", b"%d" % (error.retry_after or 1)),
        ]
        return error


class Work:
    """The verification of one token. Its time runs from each turn until the next pause, turn or end."""

    __slots__ = ("_account_budget", "_app", "_app_budget", "_began", "_limits", "_spent")

    def __init__(self, limits: VerificationLimits, app: App) -> None:
        self._limits, self._app = limits, app
        self._app_budget, self._account_budget = limits.budgets_of(app)
        self._began: float | None = None
        self._spent = 0.0

    async def acquire(self) -> None:
        """Raises AppRateLimited."""
        self.pause()
        self._check()
        if await self._limits.wait_for_turn(self._app):
            self._check()  # those before it may have used up the time
        self._began = time.thread_time()

    async def take_another_turn(self) -> None:
        """To try another key. What has begun is finished, so a flood does not starve tokens of an app's last key."""
        self.pause()
        await self._limits.wait_for_turn(self._app, first=True)
        self._began = time.thread_time()

    def pause(self) -> None:
        """Before a wait that costs the process no time."""
        if self._began is not None:
            self.add(time.thread_time() - self._began)
            self._began = None

    def add(self, seconds: float) -> None:
        self._spent += seconds
        self._charge(seconds)

    def finish(self, *, valid: bool) -> None:
        if not valid:
            self.pause()
            return
        this_turn = 0.0 if self._began is None else time.thread_time() - self._began
        # The earlier turns were charged in full; all but the weight of that is given back.
        self._charge(this_turn * VALID_WEIGHT - self._spent * (1 - VALID_WEIGHT))

    def _charge(self, seconds: float) -> None:
        now = time.monotonic()
        self._app_budget.charge(seconds, now)
        self._account_budget.charge(seconds, now)

    def _check(self) -> None:
        """Raises AppRateLimited."""
        now = time.monotonic()
        wait = max(self._app_budget.wait(now), self._account_budget.wait(now))
        if wait > 0:
            self._log(now)
            raise self._limits.refusal(wait)

    def _log(self, now: float) -> None:
        if now - self._app_budget.logged_at >= LOG_INTERVAL:
            self._app_budget.logged_at = now
            logger.warning("tokens.limited", app=self._app.id, account=self._app.account)
