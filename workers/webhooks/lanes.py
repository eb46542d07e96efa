"""Decides which event is delivered next, so that no account takes the others' time.

Each account has a lane, where its events wait in order of arrival. Accounts take turns. A lane starts with one
delivery at a time, doubles that with each delivery that does not time out, and returns to one after a timeout, so that
a receiver that hangs costs little but its own account's time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from workers.stream import Entry

LANE_EVENTS = 10_000  # waiting in memory, per account
LANE_DELIVERIES = 8  # at a time, per account
STALLED = 0.5  # seconds without a delivery that ended in time


class Lane:
    __slots__ = ("account", "allowed", "entries", "in_turn", "moved", "under_way")

    def __init__(self, account: str, now: float) -> None:
        self.account = account
        self.entries: deque[Entry] = deque()
        self.under_way = 0  # deliveries
        self.allowed = 1  # deliveries at a time
        self.moved = now  # when a delivery last ended in time, or when the lane was opened
        self.in_turn = False

    @property
    def may_start(self) -> bool:
        return bool(self.entries) and self.under_way < self.allowed


class Lanes:
    """`clock` returns seconds. Every entry that `take` returns is given back by `finish`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lanes: dict[str, Lane] = {}
        self._turns: deque[Lane] = deque()  # lanes that may have something to start, each once

    def add(self, entry: Entry) -> bool:
        """Returns False, and keeps nothing, when the account's lane is full."""
        account = entry.fields["account"]
        lane = self._lanes.get(account)
        if lane is None:
            lane = self._lanes[account] = Lane(account, self._clock())
        if len(lane.entries) >= LANE_EVENTS:
            return False
        lane.entries.append(entry)
        self._give_turn(lane)
        return True

    def take(self) -> tuple[Lane, Entry] | None:
        """Returns the next entry to deliver, from the next account in turn."""
        while self._turns:
            lane = self._turns.popleft()
            lane.in_turn = False
            if lane.may_start:
                lane.under_way += 1
                entry = lane.entries.popleft()
                self._give_turn(lane)
                return lane, entry
        return None

    def learn(self, lane: Lane, *, timed_out: bool) -> None:
        if timed_out:
            lane.allowed = 1
        else:
            lane.allowed = min(2 * lane.allowed, LANE_DELIVERIES)
            lane.moved = self._clock()

    def finish(self, lane: Lane) -> None:
        lane.under_way -= 1
        if lane.entries or lane.under_way:
            self._give_turn(lane)
        else:
            self._lanes.pop(lane.account, None)

    def give_up_stalled(self) -> list[Entry]:
        """Removes and returns the newer half of the longest lane that has stalled, newest first."""
        before = self._clock() - STALLED
        stalled = [lane.entries for lane in self._lanes.values() if lane.moved < before]
        if not stalled:
            return []
        longest = max(stalled, key=len)
        return [longest.pop() for _ in range(len(longest) // 2)]

    def clear(self) -> None:
        for lane in self._lanes.values():
            lane.entries.clear()
        self._turns.clear()

    def _give_turn(self, lane: Lane) -> None:
        if lane.may_start and not lane.in_turn:
            lane.in_turn = True
            self._turns.append(lane)
