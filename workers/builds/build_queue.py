"""Decides which deploy is built next, so that no account's builds delay those of another account.

- While other accounts wait, an account has one build at a time. Alone, it may use all shared slots.
- One more slot is reserved for accounts without a running build. So an account whose long builds use all shared slots
  does not delay another account's first build.
- The account with the fewest running builds is next. Among several, it is the one whose last build started first. The
  oldest waiting deploy of an account is built first. The ids of deploys sort by time.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec


class _Waiter(msgspec.Struct, eq=False):
    deploy_id: str
    granted: asyncio.Future[None]


class BuildQueue:
    def __init__(self, shared: int, spare: int = 1) -> None:
        self._shared, self._spare = shared, spare
        self._building: Counter[str] = Counter()  # running builds by account
        self._waiting: dict[str, list[_Waiter]] = {}  # by account, oldest first; only accounts that wait
        self._last_start: dict[str, int] = {}  # by account; only accounts that build or wait
        self._starts = itertools.count(1)

    @asynccontextmanager
    async def acquire_slot(self, account: str, deploy_id: str) -> AsyncIterator[None]:
        """Waits for a slot, and holds it until the context is left."""
        waiter = _Waiter(deploy_id, asyncio.get_running_loop().create_future())
        bisect.insort(self._waiting.setdefault(account, []), waiter, key=lambda each: each.deploy_id)
        self._grant_slots()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():  # the slot was granted at the same moment
                self._release_slot(account)
            else:
                self._remove_waiter(account, waiter)
            raise
        try:
            yield
        finally:
            self._release_slot(account)

    def list_waiting(self) -> list[str]:
        """Lists the ids of the waiting deploys, in the order in which they will be built if no other deploy arrives."""
        building, last_start, starts = Counter(self._building), dict(self._last_start), itertools.count(1 << 62)
        left = {account: deque(waiters) for account, waiters in self._waiting.items()}
        order = []
        while left:
            account = min(left, key=lambda name: (building[name], last_start.get(name, 0)))
            order.append(left[account].popleft().deploy_id)
            building[account] += 1
            last_start[account] = next(starts)
            if not left[account]:
                del left[account]
        return order

    def _grant_slots(self) -> None:
        while (account := self._find_next()) is not None:
            waiter = self._waiting[account].pop(0)
            self._building[account] += 1
            self._last_start[account] = next(self._starts)
            waiter.granted.set_result(None)
            if not self._waiting[account]:
                del self._waiting[account]

    def _find_next(self) -> str | None:
        """Returns the account that is next, or None if there is no slot for it."""
        if not self._waiting:
            return None
        account = min(self._waiting, key=lambda name: (self._building[name], self._last_start.get(name, 0)))
        total = self._building.total()
        if self._building[account] == 0:
            return account if total < self._shared + self._spare else None
        return account if total < self._shared and len(self._waiting) == 1 else None

    def _remove_waiter(self, account: str, waiter: _Waiter) -> None:
        self._waiting[account].remove(waiter)
        if not self._waiting[account]:
            del self._waiting[account]
        self._forget_account(account)
        self._grant_slots()

    def _release_slot(self, account: str) -> None:
        self._building[account] -= 1
        self._forget_account(account)
        self._grant_slots()

    def _forget_account(self, account: str) -> None:
        if not self._building[account] and account not in self._waiting:
            del self._building[account]
            self._last_start.pop(account, None)
