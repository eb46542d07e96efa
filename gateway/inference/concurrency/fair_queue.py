"""A fair queue of waiting requests: weighted max–min fairness among accounts, rotation among an account's apps, and
order of arrival within an app.

Each account has a virtual counter, as in VTC (arXiv 2401.00588). A served request raises it by COST / weight, and the
account with the lowest counter is next. Of accounts with equal counters, the one that reached its counter first is
next. An account that begins to wait starts at the lowest counter among the waiting accounts, or at its own if that is
higher. It therefore brings no credit from the time when it did not wait, and cannot get ahead by leaving and coming
back. When no account waits, the counters start again.

Pure: no clock, no I/O. `lua/inference/fair_queue.lua` keeps the same order for all processes, and also keeps each
account within its share.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

ACCOUNT_LIMIT = 60  # waiting requests of one account
QUEUE_LIMIT = 10_000  # waiting requests in all
COST = 5040  # divisible by the weights 1 to 10; counters are whole numbers, so that equal ones are equal

T = TypeVar("T", bound=Hashable)


class QueueFull(Exception):
    """The account, or the queue, has reached its limit of waiting requests."""


class _Account(Generic[T]):
    """A waiting account."""

    __slots__ = ("apps", "length", "name", "rank", "weight")

    def __init__(self, name: str, weight: float, rank: tuple[int, int]) -> None:
        self.name, self.weight = name, weight
        self.rank = rank  # virtual counter, and a sequence number from when the account reached it
        self.apps: OrderedDict[str, deque[T]] = OrderedDict()  # the next app's requests first
        self.length = 0


class FairQueue(Generic[T]):
    def __init__(self, account_limit: int = ACCOUNT_LIMIT, limit: int = QUEUE_LIMIT) -> None:
        self._account_limit, self._limit = account_limit, limit
        self._accounts: dict[str, _Account[T]] = {}  # the waiting ones
        self._where: dict[T, tuple[str, str]] = {}  # account and app of each item
        # A heap of accounts by rank. An entry with an outdated rank is skipped.
        self._ranks: list[tuple[tuple[int, int], str]] = []
        self._past: dict[str, int] = {}  # counters of accounts that waited before
        self._sequence = 0
        self._weight = 0.0  # of all waiting accounts

    def __len__(self) -> int:
        return len(self._where)

    # -- changing --------------------------------------------------------------------------------------------

    def push(self, item: T, account: str, app: str, weight: float = 1.0, *, limited: bool = True) -> None:
        """Adds a request. Raises QueueFull. The account's latest weight counts; its limit, only if `limited`."""
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
        """Removes and returns the next request of all accounts."""
        first = self._first()
        return None if first is None else self._serve(first)

    def pop_of(self, account: str) -> T | None:
        """Removes and returns the account's next request, for a grant that Redis made in the order of all processes."""
        waiting = self._accounts.get(account)
        return None if waiting is None else self._serve(waiting)

    def remove(self, item: T) -> bool:
        """Removes a waiting request at no cost to its account. Returns False if it does not wait."""
        if item not in self._where:
            return False
        account, app = self._where.pop(item)
        waiting = self._accounts[account]
        waiting.apps[app].remove(item)
        if not waiting.apps[app]:
            del waiting.apps[app]
        self._shorten(waiting)
        return True

    # -- reading ---------------------------------------------------------------------------------------------

    def first(self) -> T | None:
        """Returns the item that `pop` would return."""
        first = self._first()
        return None if first is None else self.first_of(first.name)

    def first_of(self, account: str) -> T | None:
        """Returns the item that `pop_of` would return."""
        waiting = self._accounts.get(account)
        return None if waiting is None else next(iter(waiting.apps.values()))[0]

    def items(self) -> list[tuple[T, str, str]]:
        """Returns each waiting request with its account and app."""
        return [(item, account, app) for item, (account, app) in self._where.items()]

    def accounts(self) -> list[str]:
        return list(self._accounts)

    def demand(self, account: str) -> tuple[float, int]:
        """Returns the account's weight and the number of its waiting requests."""
        waiting = self._accounts.get(account)
        return (1.0, 0) if waiting is None else (waiting.weight, waiting.length)

    def count_ahead(self, account: str, weight: float) -> float:
        """Returns the most requests that can be served before one more request of this account."""
        own, others = 0, self._weight
        if (waiting := self._accounts.get(account)) is not None:
            own, others = waiting.length, self._weight - waiting.weight
        # While this account is served own + 1 times, the others are served by their weights.
        return min(len(self._where), own + (own + 1) * others / weight)

    # -- order -----------------------------------------------------------------------------------------------

    def _activate(self, account: str, weight: float) -> _Account[T]:
        first = self._first()
        lowest = 0 if first is None else first.rank[0]
        waiting: _Account[T] = _Account(account, weight, (0, 0))
        self._accounts[account] = waiting
        self._weight += weight
        self._set_counter(waiting, max(lowest, self._past.pop(account, 0)))
        return waiting

    def _set_counter(self, waiting: _Account[T], counter: int) -> None:
        self._sequence += 1
        waiting.rank = (counter, self._sequence)
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
        self._set_counter(waiting, waiting.rank[0] + max(1, int(COST / waiting.weight + 0.5)))
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
        """Drops the counters that are not above the lowest one: a new account would start at the same counter."""
        first = self._first()
        lowest = 0 if first is None else first.rank[0]
        self._past = {name: counter for name, counter in self._past.items() if counter > lowest}
