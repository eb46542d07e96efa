"""Leaves an origin that just failed alone for a moment, so that calls which would fail too cost nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 5.0  # seconds


class Backoff:
    """Begins to pause at the `failures`-th failure in a row. Each pause is twice as long as the one before.

    A pause is never shorter than the failed call was (up to the longest pause), so an origin that hangs is waited for
    at most half of the time.
    """

    def __init__(self, failures: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._tolerated, self._clock = failures - 1, clock
        self._failed = 0  # in a row
        self._until = float("-inf")

    @property
    def remaining(self) -> float:
        """Seconds until the origin may be called again; 0 if it may be called now."""
        return max(0.0, self._until - self._clock())

    def note_failure(self, took: float) -> None:
        """`took`: seconds that the call lasted."""
        self._failed += 1
        doublings = self._failed - self._tolerated - 1
        if doublings >= 0:
            pause = min(FIRST_PAUSE * 2 ** min(doublings, 10), LONGEST_PAUSE)
            self._until = self._clock() + max(pause, min(took, LONGEST_PAUSE))

    def note_success(self) -> None:
        self._failed = 0
        self._until = float("-inf")
