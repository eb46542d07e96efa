"""One process's side of its lease of permits: what it holds, and its calls of `lua/inference/lease.lua`.

Grants and returns are counted by two numbers that only grow, so that what the process believes to hold,
`granted - returned`, is never more than what Redis has recorded for it, whichever calls, answers and messages are lost,
late or repeated. The grants since the process last called come with every answer, and by messages; each is taken once,
by its number.

The lease ends for the process a little before it ends for Redis, because the process counts from the moment before it
called. Without a lease the process takes no permit, not even one that it holds. Its next call then begins a new epoch,
which holds the permits in use and nothing else; what arrives from an older epoch is ignored.

Pure: no I/O, and the time is a parameter (monotonic seconds).
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.inference.concurrency.lease_replies import LeaseCall

SPARE = "-"  # a grant that is for no account


class Lease:
    __slots__ = ("ends", "epoch", "fresh", "granted", "length", "number", "returned", "spare", "used")

    def __init__(self, length: float) -> None:
        """`length`: seconds."""
        self.length = length
        self.ends = 0.0
        self.epoch = 0
        self.number = 0  # of the last call
        self.granted = self.returned = 0
        self.used = 0
        self.spare = 0  # granted - returned - used; without a lease nothing
        self.fresh = True  # Redis does not know this epoch yet

    def valid(self, now: float) -> bool:
        return now < self.ends

    def take(self, now: float) -> bool:
        """A spare permit for a request; False when there is none."""
        if self.spare <= 0 or now >= self.ends:
            return False
        self.spare -= 1
        self.used += 1
        return True

    def free(self) -> None:
        """A request has ended: its permit is spare."""
        self.used -= 1
        self.spare += 1

    def call(self, now: float, give_back: int = 0, waiting: int = 0) -> LeaseCall:
        """Returns `give_back` of the spare permits."""
        if now >= self.ends:
            self.epoch += 1
            self.granted, self.returned, self.spare = self.used, 0, 0
            self.fresh = True
        give_back = min(give_back, self.spare)
        self.spare -= give_back
        self.returned += give_back
        self.number += 1
        return LeaseCall(self.epoch, self.number, self.granted, self.returned, self.used, waiting, now)

    def renew(self, call: LeaseCall, now: float) -> bool:
        """The call was answered; False when the answer came too late to count on it."""
        ends = call.sent + self.length
        if call.epoch != self.epoch or now >= ends:
            return False
        self.ends = max(self.ends, ends)
        self.fresh = False
        return True

    def accept(self, epoch: int, before: int, labels: Sequence[str], now: float) -> list[str] | None:
        """The labels of the grants that are new; None when some before them are missing."""
        if epoch != self.epoch or now >= self.ends:
            return []
        if before > self.granted:
            return None
        new = list(labels[self.granted - before :])
        self.granted += len(new)
        self.spare += len(new)
        return new
