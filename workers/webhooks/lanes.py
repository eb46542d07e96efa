"""Decides which event is delivered next, so that no account delays the others.

Each account has a lane, where its events wait in order of arrival. The lanes with waiting events are served in
rotation. A lane starts with one concurrent delivery, doubles this number with each delivery that does not time out, and
returns to one after a timeout. So a receiver that hangs delays little but its own account's events.
"""

import time
from collections import deque
from collections.abc import Callable

from workers.stream import Entry

LANE_EVENTS = 10_000  # waiting in memory, per account
LANE_DELIVERIES = 8  # concurrent, per account
STALLED_SECONDS = 0.5  # without a delivery that ended in time


class Lane:
    __slots__ = ("account", "allowed", "entries", "is_queued", "moved", "under_way")

    def __init__(self, account: str, now: float) -> None:
        self.account = account
        self.entries: deque[Entry] = deque()
        self.under_way = 0  # deliveries
        self.allowed = 1  # concurrent deliveries
        self.moved = now  # when a delivery last ended in time, or when the lane was created
        self.is_queued = False

    @property
    def may_start(self) -> bool:
        return bool(self.entries) and self.under_way < self.allowed


class Lanes:
    """The lanes of all accounts, each of at most `capacity` events. `clock` returns seconds.

    Call `end_delivery` once for each entry that `take_entry` returns.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, capacity: int = LANE_EVENTS) -> None:
        self._clock, self._capacity = clock, capacity
        self._lanes: dict[str, Lane] = {}
        self._ready: deque[Lane] = deque()  # lanes that may start a delivery, each once

    def add(self, entry: Entry) -> bool:
        """Adds an entry to its account's lane. Returns False, and keeps nothing, if the lane is full."""
        account = entry.fields["account"]
        lane = self._lanes.get(account)
        if lane is None:
            lane = self._lanes[account] = Lane(account, self._clock())
        if len(lane.entries) >= self._capacity:
            return False
        lane.entries.append(entry)
        self._queue_lane(lane)
        return True

    def take_entry(self) -> tuple[Lane, Entry] | None:
        """Returns the next entry to deliver, with its lane; None if no lane may start a delivery."""
        while self._ready:
            lane = self._ready.popleft()
            lane.is_queued = False
            if lane.may_start:
                lane.under_way += 1
                entry = lane.entries.popleft()
                self._queue_lane(lane)
                return lane, entry
        return None

    def adapt_lane(self, lane: Lane, *, timed_out: bool) -> None:
        if timed_out:
            lane.allowed = 1
        else:
            lane.allowed = min(2 * lane.allowed, LANE_DELIVERIES)
            lane.moved = self._clock()

    def end_delivery(self, lane: Lane) -> None:
        lane.under_way -= 1
        if lane.entries or lane.under_way:
            self._queue_lane(lane)
        else:
            self._lanes.pop(lane.account, None)

    def drop_stalled(self) -> list[Entry]:
        """Removes and returns the newer half of the longest stalled lane, newest first."""
        before = self._clock() - STALLED_SECONDS
        stalled = [lane.entries for lane in self._lanes.values() if lane.moved < before]
        if not stalled:
            return []
        longest = max(stalled, key=len)
        return [longest.pop() for _ in range(len(longest) // 2)]

    def clear(self) -> None:
        for lane in self._lanes.values():
            lane.entries.clear()
        self._ready.clear()

    def _queue_lane(self, lane: Lane) -> None:
        if lane.may_start and not lane.is_queued:
            lane.is_queued = True
            self._ready.append(lane)
