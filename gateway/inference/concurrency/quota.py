"""One process's budget: its part of the provider's quota of requests and tokens in any minute.

The budget is leased with the permits, in the same calls (`lease.py`, `lua/inference/quota.lua`). Of each quota the
process holds `granted - returned - spent`, three numbers that only grow. The process therefore never believes to hold
more than Redis has recorded, even if calls, answers or messages are lost, late or repeated.

When a request gets its permit, the request and the most tokens that it can use are set aside. The request is spent when
it has been sent, and its tokens when it has ended; unused tokens are spare again. Whatever may still be used is
therefore held, however long a request takes to reach the provider, and whatever is spent counts for a minute.

Pure: no I/O and no clock.
"""

from collections.abc import Sequence

from gateway.inference.concurrency.lease import BudgetAnswer, BudgetCall, QuotaCall
from gateway.settings import ProviderRate

WINDOW_SECONDS = 60.0  # of the quota
INITIAL_TOKENS = 4_096.0  # the assumed tokens of a request, until some have started
MIN_SPARE_REQUESTS = 32  # for which a process keeps spare budget, if the quota is large enough
EWMA_WEIGHT = 1 / 32  # of the latest request


class QuotaAllowance:
    """The process's part of one quota."""

    __slots__ = ("granted", "quota", "returned", "spare", "spent")

    def __init__(self, quota: int) -> None:
        """`quota` is for one window; with 0 there is none, and everything fits."""
        self.quota = quota
        self.reset()

    def reset(self) -> None:
        self.granted = self.returned = self.spent = 0
        self.spare = 0  # granted - returned - spent - set aside

    def fits(self, amount: int) -> bool:
        return not self.quota or amount <= self.spare

    def set_aside(self, amount: int) -> None:
        if self.quota:
            self.spare -= amount

    def spend(self, amount: int, of: int) -> None:
        """Spends `amount` of the `of` that were set aside; the rest is spare again."""
        if self.quota:
            self.spent += amount
            self.spare += of - amount

    def accept(self, granted: int) -> None:
        if granted > self.granted:
            self.spare += granted - self.granted
            self.granted = granted

    def call(self, give_back: int, want: int) -> QuotaCall:
        """Makes a call that gives back up to `give_back` of the spare amount, and asks for `want`."""
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

    def __init__(self, rate: ProviderRate, window: float = WINDOW_SECONDS) -> None:
        """`window`: seconds for which spent amounts count."""
        self.rate, self._window = rate, window
        self.requests, self.tokens = QuotaAllowance(rate.requests), QuotaAllowance(rate.tokens)
        self.epoch = 0  # of the lease
        self._large = self._mean = INITIAL_TOKENS  # tokens of a large recent request, and of an average one
        self._low = 0  # requests; if the spare budget is for fewer, more is wanted
        self._last = -window  # monotonic seconds: when a request last started
        self._starts = self._starts_before = 0  # since the last regular renewal, and between the two before

    # -- requests --------------------------------------------------------------------------------------------

    def is_possible(self, tokens: int) -> bool:
        return not self.rate.tokens or tokens <= self.rate.tokens

    def fits(self, tokens: int) -> bool:
        return self.requests.fits(1) and self.tokens.fits(tokens)

    def take(self, tokens: int, now: float) -> None:
        """Sets aside the budget of a request that fits."""
        self.requests.set_aside(1)
        self.tokens.set_aside(tokens)
        self._mean += (tokens - self._mean) * EWMA_WEIGHT
        self._large = max(tokens, self._large + (tokens - self._large) * EWMA_WEIGHT)
        self._last = now
        self._starts += 1

    def spend_request(self, epoch: int) -> None:
        """Spends a request that has been sent. `epoch` is the one in which it was set aside."""
        if epoch == self.epoch:
            self.requests.spend(1, 1)

    def return_request(self, epoch: int) -> None:
        """Makes a request that was not sent spare again."""
        if epoch == self.epoch:
            self.requests.spend(0, 1)

    def spend_tokens(self, epoch: int, tokens: int, used: int) -> None:
        """Spends the tokens of a request that has ended. `tokens` were set aside for it in that epoch."""
        if epoch == self.epoch:
            self.tokens.spend(min(used, tokens), tokens)

    # -- calls -----------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Starts again when the lease has a new epoch: Redis counts everything held before as spent."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.requests.reset()
            self.tokens.reset()

    def call(self, now: float, *, scarce: bool, regular: bool, wanted: bool, returnable: bool) -> BudgetCall:
        """Makes a call that asks for missing spare budget and returns surplus, all of it while `scarce`.

        A `regular` call is a renewal at a fixed interval; requests that start between two of them are counted.
        """
        target = 0 if scarce else max(MIN_SPARE_REQUESTS, self._starts // 4, self._starts_before // 4)
        if regular:
            self._starts, self._starts_before = 0, self._starts
        self._low = target // 2
        calls: list[QuotaCall] = []
        for allowance, amount in ((self.requests, target), (self.tokens, int(target * self._large))):
            excess = max(0, allowance.spare - amount) if returnable and (scarce or regular) else 0
            calls.append(allowance.call(excess, max(0, amount - allowance.spare) if wanted else 0))
        return BudgetCall(int(self._window * 1000), now - self._last <= self._window, *calls)

    def accept(self, answer: BudgetAnswer) -> None:
        self.requests.accept(answer.requests)
        self.tokens.accept(answer.tokens)

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def spare(self) -> bool:
        return self.requests.spare > 0 or self.tokens.spare > 0

    @property
    def is_low(self) -> bool:
        return not (self.requests.fits(self._low) and self.tokens.fits(int(self._low * self._large)))

    def time_until_free(self, quota: BudgetAnswer, ahead: float, tokens: int) -> float:
        """Returns the seconds after `quota` until a request with so many tokens can start, behind `ahead` others."""
        frees = [(at, requests) for at, requests, _ in quota.outlook]
        by_requests = time_until_free(ahead + 1, self.rate.requests, quota.free_requests, frees, self._window)
        frees = [(at, tokens) for at, _, tokens in quota.outlook]
        needed = ahead * self._mean + tokens
        return max(by_requests, time_until_free(needed, self.rate.tokens, quota.free_tokens, frees, self._window))


def time_until_free(needed: float, quota: int, free: int, frees: Sequence[tuple[float, int]], window: float) -> float:
    """Returns the seconds until `needed` of a quota is free: first `free`, then the spent, at last the held amounts.

    Freed amounts also go to others, so each full quota of the needed amount takes one window more.
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
