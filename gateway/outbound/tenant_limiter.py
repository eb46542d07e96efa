"""Shares a scarce resource (connections, lookups) among tenants, so that no tenant can block the others.

A fixed number of slots is shared. Half of them are reserved for tenants that hold none. Of the other half, a tenant may
acquire a slot while it holds fewer than an eighth of the free ones ("dynamic thresholds", Choudhury and Hahne, 1998): a
single tenant gets a ninth of that half, and the more tenants hold slots, the fewer each may hold. So a tenant without
slots waits only while more tenants are active than half the number of slots. Waiting tenants are served in rotation.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

FREE_SLOTS_PER_HELD = 8  # in the shared half


def may_hold_more(held: int, free: int, reserved: int) -> bool:
    """Returns whether a tenant that holds so many slots may have another one."""
    return free > 0 if not held else held < (free - reserved) / FREE_SLOTS_PER_HELD


class TenantLimiter:
    """A semaphore that is fair by tenant. Callers limit how many of them wait, and for how long."""

    def __init__(self, total: int) -> None:
        self._free, self._reserved = total, total // 2
        self._held: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, tenant: str) -> Callable[[], None]:
        """Waits for a slot and returns the function that releases it. Calling that again does nothing."""
        if tenant not in self._waiting and self._may_acquire(tenant):
            self._grant(tenant)
        else:
            await self._wait(tenant)
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._release(tenant)

        return release

    def _may_acquire(self, tenant: str) -> bool:
        return may_hold_more(self._held.get(tenant, 0), self._free, self._reserved)

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
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # granted at the same moment
                self._release(tenant)
            elif slot in queue:
                queue.remove(slot)
                if not queue and self._waiting.get(tenant) is queue:
                    del self._waiting[tenant]
            raise

    def _serve_waiting(self) -> None:
        """Grants each waiting tenant at most one slot, starting with the one that has waited longest."""
        for tenant in list(self._waiting):
            if not self._free:
                break
            queue = self._waiting[tenant]
            while queue and queue[0].done():  # canceled, and its task has not run since
                queue.popleft()
            if queue and self._may_acquire(tenant):
                self._grant(tenant)
                queue.popleft().set_result(None)
                self._waiting.move_to_end(tenant)
            if not queue:
                del self._waiting[tenant]
