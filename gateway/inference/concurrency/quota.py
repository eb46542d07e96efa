"""One process's budget: what it holds of the provider's quota of any minute, of requests and of tokens.

It is leased with the permits, in the same calls (`lease.py`, `lua/inference/quota.lua`). Of each quota the process
holds `granted - returned - spent`, three numbers that only grow, so that a call, an answer or a message that is lost,
late or repeated can never make it believe to hold more than Redis has recorded.

A request and the tokens that it needs at most are set aside when it gets its permit. The request is spent when it has
been sent, and the tokens that it has used when it has ended; the others are spare again. So what may still be used is
held, however long the way to the provider takes, and what is spent counts for a minute.

Pure: no I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.inference.concurrency.lease_replies import BudgetAnswer, BudgetCall, QuotaCall
from gateway.settings import ProviderRate

WINDOW = 60.0  # seconds
LARGE = 4_096.0  # tokens of a request, until some have started
KEEP = 32  # requests for which a process has spare budget, where the quota is so large
MEMORY = 1 / 32  # weight of the latest request


class Stock:
    """What the process holds of one quota."""

    __slots__ = ("granted", "quota", "returned", "spare", "spent")

    def __init__(self, quota: int) -> None:
        """`quota`: of a window; 0: none, and everything fits."""
        self.quota = quota
        self.reset()

    def reset(self) -> None:
        self.granted = self.returned = self.spent = 0
        self.spare = 0  # granted - returned - spent, less what is set aside

    def fits(self, amount: int) -> bool:
        return not self.quota or amount <= self.spare

    def set_aside(self, amount: int) -> None:
        if self.quota:
            self.spare -= amount

    def spend(self, amount: int, of: int) -> None:
        """So many of those that were set aside; the others are spare."""
        if self.quota:
            self.spent += amount
            self.spare += of - amount

    def accept(self, granted: int) -> None:
        if granted > self.granted:
            self.spare += granted - self.granted
            self.granted = granted

    def call(self, give_back: int, want: int) -> QuotaCall:
        """Returns `give_back` of what is spare, and asks for `want`."""
        give_back = min(give_back, self.spare) if self.quota else 0
        self.spare -= give_back
        self.returned += give_back
        return QuotaCall(self.quota, self.granted, self.returned, self.spent, want if self.quota else 0)


class Budget:
    __slots__ = (
        "_large",
        "_last",
        "_low",
        "_mean",
        "_starts",
        "_starts_before",
        "_window",
        "epoch",
        "rate",
        "requests",
        "tokens",
    )

    def __init__(self, rate: ProviderRate, window: float = WINDOW) -> None:
        """`window`: seconds, for which what is spent counts."""
        self.rate, self._window = rate, window
        self.requests, self.tokens = Stock(rate.requests), Stock(rate.tokens)
        self.epoch = 0  # of the lease
        self._large = self._mean = LARGE  # tokens of a large request of late, and of a usual one
        self._low = 0  # requests for which budget shall be spare at least
        self._last = -window  # monotonic seconds: when a request last started
        self._starts = self._starts_before = 0  # since the last regular renewal, and in the time before it

    # -- requests --------------------------------------------------------------------------------------------

    def possible(self, tokens: int) -> bool:
        return not self.rate.tokens or tokens <= self.rate.tokens

    def fits(self, tokens: int) -> bool:
        return self.requests.fits(1) and self.tokens.fits(tokens)

    def take(self, tokens: int, now: float) -> None:
        """Sets aside what a request needs that fits."""
        self.requests.set_aside(1)
        self.tokens.set_aside(tokens)
        self._mean += (tokens - self._mean) * MEMORY
        self._large = max(tokens, self._large + (tokens - self._large) * MEMORY)
        self._last = now
        self._starts += 1

    def spend_request(self, epoch: int) -> None:
        """The request has been sent. `epoch`: when it was set aside."""
        if epoch == self.epoch:
            self.requests.spend(1, 1)

    def return_request(self, epoch: int) -> None:
        """The request was not sent."""
        if epoch == self.epoch:
            self.requests.spend(0, 1)

    def spend_tokens(self, epoch: int, tokens: int, used: int) -> None:
        """The request has ended, for which `tokens` were set aside in that epoch."""
        if epoch == self.epoch:
            self.tokens.spend(min(used, tokens), tokens)

    # -- calls -----------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Follows the lease: of what was held before, Redis counts everything as spent."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.requests.reset()
            self.tokens.reset()

    def call(self, now: float, *, scarce: bool, regular: bool, wanted: bool, returnable: bool) -> BudgetCall:
        """Asks for what is missing of the spare budget, and returns what is too much of it: all while it is `scarce`.

        `regular`: the renewals whose time is fixed, which count what started between two of them.
        """
        target = 0 if scarce else max(KEEP, self._starts // 4, self._starts_before // 4)
        if regular:
            self._starts, self._starts_before = 0, self._starts
        self._low = target // 2
        calls: list[QuotaCall] = []
        for stock, amount in ((self.requests, target), (self.tokens, int(target * self._large))):
            excess = max(0, stock.spare - amount) if returnable and (scarce or regular) else 0
            calls.append(stock.call(excess, max(0, amount - stock.spare) if wanted else 0))
        return BudgetCall(int(self._window * 1000), now - self._last <= self._window, *calls)

    def accept(self, answer: BudgetAnswer) -> None:
        self.requests.accept(answer.requests)
        self.tokens.accept(answer.tokens)

    # -- asking ----------------------------------------------------------------------------------------------

    @property
    def spare(self) -> bool:
        return self.requests.spare > 0 or self.tokens.spare > 0

    @property
    def is_low(self) -> bool:
        return not (self.requests.fits(self._low) and self.tokens.fits(int(self._low * self._large)))

    def time_until_free(self, quota: BudgetAnswer, ahead: float, tokens: int) -> float:
        """Seconds from `quota` until a request with so many tokens can start, and those ahead of it."""
        frees = [(at, requests) for at, requests, _ in quota.outlook]
        by_requests = time_until_free(ahead + 1, self.rate.requests, quota.free_requests, frees, self._window)
        frees = [(at, tokens) for at, _, tokens in quota.outlook]
        needed = ahead * self._mean + tokens
        return max(by_requests, time_until_free(needed, self.rate.tokens, quota.free_tokens, frees, self._window))


def time_until_free(needed: float, quota: int, free: int, frees: Sequence[tuple[float, int]], window: float) -> float:
    """Seconds until so much of a quota has come free: `free` now, then what was spent, and at last what is held.

    What comes free goes to others, so that what is needed beyond the quota takes as many windows more.
    """
    if not quota:
        return 0.0
    windows = max(0, -int(-needed // quota) - 1)
    missing, seconds = needed - windows * quota - free, 0.0
    for at, amount in frees:
        if missing <= 0:
            break
        missing, seconds = missing - amount, at
    return windows * window + (seconds if missing <= 0 else window)
