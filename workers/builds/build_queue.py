"""Whose build is next: the accounts take turns, so that no account's deploys hold up another's.

- While others wait, an account has one build at a time. Alone, it may have as many as the shared slots.
- One more slot is kept for an account that builds nothing: an account with long builds in all shared slots delays
  nobody else's first one.
- Among those who may build, the account with the fewest builds in progress is next, then the one whose last turn is
  the longest ago. Of an account's own deploys that wait, the oldest is next; deploys' ids sort by time.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec


class _Waiting(msgspec.Struct, eq=False):
    deploy_id: str
    turn: asyncio.Future[None]


class BuildQueue:
    def __init__(self, shared: int, spare: int = 1) -> None:
        self._shared, self._spare = shared, spare
        self._building: Counter[str] = Counter()  # builds in progress by account
        self._waiting: dict[str, list[_Waiting]] = {}  # by account, oldest first; an account without any is not in it
        self._last_turn: dict[str, int] = {}  # of the accounts that build or wait
        self._turns = itertools.count(1)

    @asynccontextmanager
    async def take(self, account: str, deploy_id: str) -> AsyncIterator[None]:
        """Waits for the account's turn, and holds a slot until the context is left."""
        waiting = _Waiting(deploy_id, asyncio.get_running_loop().create_future())
        bisect.insort(self._waiting.setdefault(account, []), waiting, key=lambda each: each.deploy_id)
        self._grant()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled():  # it got its turn in the same moment
                self._end(account)
            else:
                self._leave(account, waiting)
            raise
        try:
            yield
        finally:
            self._end(account)

    def order(self) -> list[str]:
        """The ids of the deploys that wait, in the order in which they will be built if no other comes."""
        building, last_turn, turns = Counter(self._building), dict(self._last_turn), itertools.count(1 << 62)
        left = {account: deque(waiting) for account, waiting in self._waiting.items()}
        order = []
        while left:
            account = min(left, key=lambda name: (building[name], last_turn.get(name, 0)))
            order.append(left[account].popleft().deploy_id)
            building[account] += 1
            last_turn[account] = next(turns)
            if not left[account]:
                del left[account]
        return order

    def _grant(self) -> None:
        while (account := self._next()) is not None:
            waiting = self._waiting[account].pop(0)
            self._building[account] += 1
            self._last_turn[account] = next(self._turns)
            waiting.turn.set_result(None)
            if not self._waiting[account]:
                del self._waiting[account]

    def _next(self) -> str | None:
        """The account whose turn it is, if a slot is free for it."""
        if not self._waiting:
            return None
        account = min(self._waiting, key=lambda name: (self._building[name], self._last_turn.get(name, 0)))
        total = self._building.total()
        if self._building[account] == 0:
            return account if total < self._shared + self._spare else None
        return account if total < self._shared and len(self._waiting) == 1 else None

    def _leave(self, account: str, waiting: _Waiting) -> None:
        self._waiting[account].remove(waiting)
        if not self._waiting[account]:
            del self._waiting[account]
        self._forget(account)
        self._grant()

    def _end(self, account: str) -> None:
        self._building[account] -= 1
        self._forget(account)
        self._grant()

    def _forget(self, account: str) -> None:
        if not self._building[account] and account not in self._waiting:
            del self._building[account]
            self._last_turn.pop(account, None)
