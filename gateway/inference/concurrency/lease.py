"""One process's side of its lease of permits: the permits it holds, and its calls of `lua/inference/lease.lua`.

Two numbers that only grow count grants and returns. The process therefore never believes to hold more permits
(`granted - returned`) than Redis has recorded for it, even if calls, answers or messages are lost, late or repeated.
Every answer, and messages too, contain the grants since the process last called. Each grant has a number, by which the
process takes it once.

The lease ends for the process a little before it ends for Redis, because the process counts from the moment before its
call. Without a lease the process takes no permit, not even one that it holds. Its next call then begins a new epoch,
which holds only the permits in use. Answers and messages of an older epoch are ignored.

Pure: no I/O, and the time is a parameter (monotonic seconds).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.keys import permits_key, waiting_key
from gateway.redis.client import Store
from gateway.settings import DEFAULT_PROVIDER


class LeaseCall(msgspec.Struct, frozen=True):
    """A process's report of its lease of permits."""

    epoch: int
    number: int
    granted: int  # grants that the process knows of
    returned: int
    used: int
    waiting: int
    sent: float  # monotonic seconds


class QuotaCall(msgspec.Struct, frozen=True):
    """A process's report of its part of one quota: of requests, or of tokens."""

    quota: int  # of a window, for all processes; 0: none
    granted: int  # as far as the process knows
    returned: int
    spent: int
    want: int  # spare ones


class BudgetCall(msgspec.Struct, frozen=True):
    window: int  # ms
    recent: bool  # the process has started a request within one window
    requests: QuotaCall
    tokens: QuotaCall

    @property
    def wants(self) -> bool:
        return self.requests.want > 0 or self.tokens.want > 0

    def flatten(self) -> list[int]:
        """Returns the arguments of the script, in its order."""
        amounts = [(each.granted, each.returned, each.spent, each.want) for each in (self.requests, self.tokens)]
        return [self.requests.quota, self.tokens.quota, self.window, int(self.recent), *amounts[0], *amounts[1]]


class BudgetAnswer(msgspec.Struct, frozen=True):
    requests: int  # granted to the process since its lease began
    tokens: int
    free_requests: int  # of all processes; -1: no quota
    free_tokens: int
    free_permits: int
    outlook: list[tuple[float, int, int]]  # seconds until so many requests and tokens are free, while any wait here


class LeaseAnswer(msgspec.Struct, frozen=True):
    known: bool  # False: Redis has forgotten which requests wait in this process
    scarce: bool  # requests wait somewhere, or processes hold more permits than the limit allows
    in_force: int  # the limit
    waiting: int  # requests, of all processes
    accounts: int  # that wait, of all processes
    frees_in: float  # seconds until a permit may become free by itself; 0: never
    before: int  # grants before the following
    labels: list[str]  # for each grant its account, or '-' for a spare one
    excess: dict[str, int]  # account → waiting requests beyond its limit, which this process refuses
    budget: BudgetAnswer | None = None  # only with a quota


def read_lease_answer(reply: Sequence[Any]) -> LeaseAnswer | None:
    if reply[0] == "late":
        return None
    known, scarce, in_force, waiting, accounts, frees_in, before, labels, excess, *budget = reply[1:]
    return LeaseAnswer(
        known=known == 1,
        scarce=scarce == 1,
        in_force=int(in_force),
        waiting=int(waiting),
        accounts=int(accounts),
        frees_in=int(frees_in) / 1000,
        before=int(before),
        labels=list(labels),
        excess={account: int(count) for account, count in zip(excess[::2], excess[1::2], strict=True)},
        budget=_read_budget(budget[0]) if budget else None,
    )


def _read_budget(reply: Sequence[Any]) -> BudgetAnswer:
    requests, tokens, free_requests, free_tokens, free_permits, window_start, spent = reply
    outlook = [((ms - int(window_start)) / 1000, r, t) for ms, r, t in (map(int, entry.split()) for entry in spent)]
    return BudgetAnswer(requests, tokens, free_requests, free_tokens, free_permits, outlook)


class Share(msgspec.Struct, frozen=True):
    """The current use of the permits by all processes."""

    held: int  # permits
    used: int  # of them
    waiting: dict[str, int]  # account -> waiting requests


async def read_share(store: Store, provider: str = DEFAULT_PROVIDER) -> Share:
    """Reads a provider's share for the operators' page. Raises BackboneUnavailable."""
    permits: dict[str, str] = await store.client.hgetall(permits_key(provider))
    waiting: dict[str, str] = await store.client.hgetall(waiting_key(provider))
    counts = [[int(field) for field in text.split()[:7]] for text in permits.values()]
    return Share(
        held=sum(granted - returned for _, _, granted, returned, *_ in counts),
        used=sum(used for _, _, _, _, _, used, _ in counts),
        waiting={
            account: count
            for account, text in waiting.items()
            if (count := sum(int(each.rpartition("=")[2].partition("/")[0]) for each in text.split()[1:]))
        },
    )


SPARE = "-"  # the label of a grant that is for no account


class PermitLease:
    __slots__ = ("ends", "epoch", "granted", "is_new", "length", "number", "returned", "spare", "used")

    def __init__(self, length: float) -> None:
        """`length`: seconds."""
        self.length = length
        self.ends = 0.0
        self.epoch = 0
        self.number = 0  # of the last call
        self.granted = self.returned = 0
        self.used = 0
        self.spare = 0  # granted - returned - used; 0 without a lease
        self.is_new = True  # Redis does not know this epoch yet

    def take(self, now: float) -> bool:
        """Takes a spare permit for a request. Returns False if there is none."""
        if self.spare <= 0 or now >= self.ends:
            return False
        self.spare -= 1
        self.used += 1
        return True

    def release(self) -> None:
        """Makes the permit of a request that has ended spare."""
        self.used -= 1
        self.spare += 1

    def call(self, now: float, give_back: int = 0, waiting: int = 0) -> LeaseCall:
        """Makes the next call, which gives back up to `give_back` of the spare permits."""
        if now >= self.ends:
            self.epoch += 1
            self.granted, self.returned, self.spare = self.used, 0, 0
            self.is_new = True
        give_back = min(give_back, self.spare)
        self.spare -= give_back
        self.returned += give_back
        self.number += 1
        return LeaseCall(self.epoch, self.number, self.granted, self.returned, self.used, waiting, now)

    def renew(self, call: LeaseCall, now: float) -> bool:
        """Renews the lease after an answer. Returns False if the answer came too late."""
        ends = call.sent + self.length
        if call.epoch != self.epoch or now >= ends:
            return False
        self.ends = max(self.ends, ends)
        self.is_new = False
        return True

    def accept(self, epoch: int, before: int, labels: Sequence[str], now: float) -> list[str] | None:
        """Takes new grants and returns their labels. Returns None if grants before them are missing."""
        if epoch != self.epoch or now >= self.ends:
            return []
        if before > self.granted:
            return None
        new = list(labels[self.granted - before :])
        self.granted += len(new)
        self.spare += len(new)
        return new
