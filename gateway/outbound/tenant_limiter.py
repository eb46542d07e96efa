"""Shares what is scarce (connections, look-ups) among tenants, so that none of them can hold up the others.

Half of all turns are kept for tenants that hold none. Of the other half, a tenant may take a turn while it holds fewer
than an eighth of those that are free ("dynamic thresholds", Choudhury and Hahne, 1998): one tenant alone gets a ninth
of them, and the more tenants hold turns, the fewer each may hold. A tenant that holds none therefore waits only when
more tenants are busy than half of the turns. Tenants that wait are served in rotation.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

SHARE = 8  # a tenant holds at most one turn for this many free ones in the shared half


class Turns:
    """Callers bound how many wait, and how long."""

    def __init__(self, total: int) -> None:
        self._free, self._kept = total, total // 2
        self._held: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, tenant: str) -> Callable[[], None]:
        """Waits for a turn. The caller ends it by calling the returned function; further calls do nothing."""
        if tenant not in self._waiting and self._may_take(tenant):
            self._grant(tenant)
        else:
            await self._wait(tenant)
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._release(tenant)

        return end

    def _may_take(self, tenant: str) -> bool:
        held = self._held.get(tenant, 0)
        return self._free > 0 if not held else held < (self._free - self._kept) / SHARE

    def _grant(self, tenant: str) -> None:
        self._free -= 1
        self._held[tenant] = self._held.get(tenant, 0) + 1

    def _release(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._serve_waiting()

    async def _wait(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # granted in the same moment
                self._release(tenant)
            elif turn in queue:
                queue.remove(turn)
                if not queue and self._waiting.get(tenant) is queue:
                    del self._waiting[tenant]
            raise

    def _serve_waiting(self) -> None:
        """One turn at most for each waiting tenant, the longest unserved first."""
        for tenant in list(self._waiting):
            if not self._free:
                break
            queue = self._waiting[tenant]
            while queue and queue[0].done():  # canceled, and its task has not run since
                queue.popleft()
            if queue and self._may_take(tenant):
                self._grant(tenant)
                queue.popleft().set_result(None)
                self._waiting.move_to_end(tenant)
            if not queue:
                del self._waiting[tenant]
