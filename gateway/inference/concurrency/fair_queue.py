"""Which of the waiting requests is next: weighted max–min fairness between accounts, apps in turn within an account,
order of arrival within an app.

Each account has a virtual counter, as in VTC (arXiv 2401.00588). Every request that is served raises it by
COST / weight, and the account with the lowest counter is next; of equal ones the account that reached it first.
An account that begins to wait starts at the lowest counter among the waiting ones, or at its own if that is higher: it
brings no credit from the time in which it did not wait, and it cannot go ahead by leaving and coming back. When nobody
waits the counters start again.

Pure: no clock, no I/O. `lua/inference/fair_queue.lua` keeps the same order over all processes, and each account within
its share.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

ACCOUNT_LIMIT = 60  # waiting requests of one account
LIMIT = 10_000  # waiting requests in all
COST = 5040  # divisible by the weights 1 to 10; counters are whole numbers, so that equal ones are equal

T = TypeVar("T", bound=Hashable)


class QueueFull(Exception):
    """The account, or the queue, has as many waiting requests as it may have."""


class _Account(Generic[T]):
    __slots__ = ("apps", "length", "name", "rank", "weight")

    def __init__(self, name: str, weight: float, rank: tuple[int, int]) -> None:
        self.name, self.weight = name, weight
        self.rank = rank  # virtual counter, and when it was reached
        self.apps: OrderedDict[str, deque[T]] = OrderedDict()  # the next app's requests first
        self.length = 0


class FairQueue(Generic[T]):
    def __init__(self, account_limit: int = ACCOUNT_LIMIT, limit: int = LIMIT) -> None:
        self._account_limit, self._limit = account_limit, limit
        self._accounts: dict[str, _Account[T]] = {}  # those that wait
        self._where: dict[T, tuple[str, str]] = {}  # account and app of each item
        # Accounts by rank. An entry whose rank is no longer the account's is skipped.
        self._ranks: list[tuple[tuple[int, int], str]] = []
        self._past: dict[str, int] = {}  # counters of accounts that waited before
        self._events = 0
        self._weight = 0.0  # of all accounts that wait

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, item: T) -> bool:
        return item in self._where

    # -- changing --------------------------------------------------------------------------------------------

    def push(self, item: T, account: str, app: str, weight: float = 1.0, *, limited: bool = True) -> None:
        """Raises QueueFull. The account's latest weight counts; its limit does only if it is `limited`."""
        waiting = self._accounts.get(account)
        full = limited and waiting is not None and waiting.length >= self._account_limit
        if full or len(self._where) >= self._limit:
            raise QueueFull
        if waiting is None:
            waiting = self._activate(account, weight)
        self._weight += weight - waiting.weight
        waiting.weight = weight
        waiting.apps.setdefault(app, deque()).append(item)
        waiting.length += 1
        self._where[item] = (account, app)

    def pop(self) -> T | None:
        """The next request of all accounts."""
        first = self._first()
        return None if first is None else self._serve(first)

    def pop_of(self, account: str) -> T | None:
        """The account's next request, for a turn that was decided for all processes together."""
        waiting = self._accounts.get(account)
        return None if waiting is None else self._serve(waiting)

    def remove(self, item: T) -> bool:
        """A waiting request leaves; its account pays nothing. False when it does not wait."""
        if item not in self._where:
            return False
        account, app = self._where.pop(item)
        waiting = self._accounts[account]
        waiting.apps[app].remove(item)
        if not waiting.apps[app]:
            del waiting.apps[app]
        self._shorten(waiting)
        return True

    # -- asking ----------------------------------------------------------------------------------------------

    def first(self) -> T | None:
        """The item that `pop` would return."""
        first = self._first()
        return None if first is None else self.first_of(first.name)

    def first_of(self, account: str) -> T | None:
        """The item that `pop_of` would return."""
        waiting = self._accounts.get(account)
        return None if waiting is None else next(iter(waiting.apps.values()))[0]

    def items(self) -> list[tuple[T, str, str]]:
        """Each waiting request with its account and app."""
        return [(item, account, app) for item, (account, app) in self._where.items()]

    def accounts(self) -> list[str]:
        return list(self._accounts)

    def demand(self, account: str) -> tuple[float, int]:
        """The account's weight and how many of its requests wait."""
        waiting = self._accounts.get(account)
        return (1.0, 0) if waiting is None else (waiting.weight, waiting.length)

    def ahead(self, account: str, weight: float) -> float:
        """How many requests come before one more of this account, at most."""
        own, others = 0, self._weight
        if (waiting := self._accounts.get(account)) is not None:
            own, others = waiting.length, self._weight - waiting.weight
        # While this account is served own + 1 times, the others get their share of turns.
        return min(len(self._where), own + (own + 1) * others / weight)

    # -- order -----------------------------------------------------------------------------------------------

    def _activate(self, account: str, weight: float) -> _Account[T]:
        first = self._first()
        lowest = 0 if first is None else first.rank[0]
        waiting: _Account[T] = _Account(account, weight, (0, 0))
        self._accounts[account] = waiting
        self._weight += weight
        self._rank(waiting, max(lowest, self._past.pop(account, 0)))
        return waiting

    def _rank(self, waiting: _Account[T], counter: int) -> None:
        self._events += 1
        waiting.rank = (counter, self._events)
        heapq.heappush(self._ranks, (waiting.rank, waiting.name))

    def _first(self) -> _Account[T] | None:
        while self._ranks:
            rank, name = self._ranks[0]
            waiting = self._accounts.get(name)
            if waiting is not None and waiting.rank == rank:
                return waiting
            heapq.heappop(self._ranks)
        return None

    def _serve(self, waiting: _Account[T]) -> T:
        app, items = next(iter(waiting.apps.items()))
        item = items.popleft()
        if items:
            waiting.apps.move_to_end(app)
        else:
            del waiting.apps[app]
        del self._where[item]
        self._rank(waiting, waiting.rank[0] + max(1, int(COST / waiting.weight + 0.5)))
        self._shorten(waiting)
        return item

    def _shorten(self, waiting: _Account[T]) -> None:
        waiting.length -= 1
        if waiting.length:
            return
        del self._accounts[waiting.name]
        self._weight -= waiting.weight
        self._past[waiting.name] = waiting.rank[0]
        if not self._accounts:
            self._ranks.clear()
            self._past.clear()
            self._weight = 0.0
        elif len(self._past) > 2 * len(self._accounts) + 64:
            self._forget_past()

    def _forget_past(self) -> None:
        """A counter that is not above the lowest gives no account less than it would start with."""
        first = self._first()
        lowest = 0 if first is None else first.rank[0]
        self._past = {name: counter for name, counter in self._past.items() if counter > lowest}
