"""Requests that wait for a permit of whichever provider has one first.

A waiting request stands in the fair queue of each provider that may serve it (`permits.py`), and takes the first permit
that any of them grants. It leaves the other queues at once; a permit that another provider has granted in that moment
goes back unused. Each provider therefore keeps its limit and its fairness, as if it were the only one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from gateway.errors import ProviderQuotaExhausted, ProviderRefused, ServiceError


class PermitQueue(Protocol):
    """The permits of one provider, and the queue for them."""

    def join(self, waiter: Waiter) -> None:
        """Raises ProviderQuotaExhausted if it is full, and ProviderRefused if the request could never start."""

    def remove(self, waiter: Waiter) -> None: ...

    def refusal_of(self, waiter: Waiter) -> ProviderQuotaExhausted:
        """Returns the refusal of one more request like this one, with the estimated time until it could start."""

    def mark_sent(self, permit: Permit) -> None: ...

    def release(self, permit: Permit, *, served: bool = True, tokens: int | None = None) -> None: ...


class Permit:
    """The permit of one request, until its `permits` take it back."""

    __slots__ = ("account", "epoch", "held", "permits", "sent", "since", "tokens")

    def __init__(self, permits: PermitQueue, account: str, since: float, tokens: int = 0, epoch: int = 0) -> None:
        self.permits = permits
        self.account = account
        self.since = since  # monotonic seconds
        self.tokens = tokens  # at most
        self.epoch = epoch  # of the lease
        self.held, self.sent = True, False


class Waiter:
    """One waiting request. It ends with `wait` or with `leave`."""

    __slots__ = ("_future", "account", "app", "queues", "since", "tokens", "weight")

    def __init__(self, account: str, app: str, weight: float, tokens: int = 0, since: float | None = None) -> None:
        """`tokens` is the most that the request may use; `since`, in monotonic seconds, is now by default."""
        self.account, self.app, self.weight, self.tokens = account, app, weight, tokens
        self.since = time.monotonic() if since is None else since
        self.queues: list[PermitQueue] = []
        self._future: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()

    def move(self, queues: Sequence[PermitQueue]) -> None:
        """Leaves the queues that are not among these, and joins the others. If none takes it, `wait` raises why."""
        for queue in self.queues[:]:
            if queue not in queues:
                self._leave_one(queue)
        refusals: list[ServiceError] = []
        for queue in queues:
            if queue in self.queues or self._future.done():
                continue
            self.queues.append(queue)  # first, because it may grant a permit at once
            try:
                queue.join(self)
            except (ProviderQuotaExhausted, ProviderRefused) as refusal:
                self.queues.remove(queue)
                refusals.append(refusal)
        if refusals and not self.queues:
            self.leave(min(refusals, key=_patience))

    async def wait(
        self, longest: float, interval: float | None = None, keep_alive: Callable[[], Awaitable[None]] | None = None
    ) -> Permit:
        """Waits for the permit, and calls `keep_alive` whenever `interval` seconds have passed.

        Raises ProviderQuotaExhausted after the `longest` time, in seconds, or the error that `leave` was called with.
        """
        timer = asyncio.get_running_loop().call_later(longest, self._expire)
        try:
            while keep_alive is not None and not (await asyncio.wait([self._future], timeout=interval))[0]:
                await keep_alive()
            return await self._future
        except asyncio.CancelledError:
            # The permit may have arrived at the same moment.
            if self._future.done() and not self._future.cancelled() and self._future.exception() is None:
                permit = self._future.result()
                permit.permits.release(permit, served=False)
            raise
        finally:
            timer.cancel()
            self._leave_all()

    def grant(self, permit: Permit) -> bool:
        """Returns False if the request no longer waits."""
        if self._future.done():
            return False
        self._future.set_result(permit)
        self._leave_all()
        return True

    def leave(self, error: Exception) -> None:
        """Leaves all queues, and lets `wait` raise the error. Has no effect once the permit is granted."""
        self._leave_all()
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # marks it as retrieved: perhaps nothing awaits it

    def refuse(self, queue: PermitQueue, error: ServiceError) -> None:
        """Leaves one queue, which has no room for the request. If it was the last one, `wait` raises the error."""
        self._leave_one(queue)
        if not self.queues:
            self.leave(error)

    def _leave_one(self, queue: PermitQueue) -> None:
        if queue in self.queues:
            self.queues.remove(queue)
            queue.remove(self)

    def _leave_all(self) -> None:
        for queue in self.queues[:]:
            self._leave_one(queue)

    def _expire(self) -> None:
        queues = self.queues[:]
        self._leave_all()  # first, so that the request does not count as one ahead of itself
        self.leave(min((queue.refusal_of(self) for queue in queues), key=_patience, default=ProviderQuotaExhausted()))


def _patience(refusal: ServiceError) -> float:
    """Returns the order of refusals: the request could start soonest after the first one."""
    after = refusal.retry_after if isinstance(refusal, ProviderQuotaExhausted) else None
    return float("inf") if after is None else after
