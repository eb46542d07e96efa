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

from gateway.inference.concurrency.lease_replies import LeaseCall

SPARE = "-"  # the label of a grant that is for no account


class Lease:
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
