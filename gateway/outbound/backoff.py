"""Pauses calls to an origin that has just failed, so that calls which would also fail cost nothing."""

import time
from collections.abc import Callable

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 5.0


class Backoff:
    """Pauses after `failures` failures in a row. Each pause is twice as long as the previous one.

    A pause is at least as long as the failed call (up to the longest pause), so at most half of the time is spent on
    waiting for an origin that hangs.
    """

    def __init__(self, failures: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._tolerated, self._clock = failures - 1, clock
        self._failed = 0  # in a row
        self._until = float("-inf")

    @property
    def remaining(self) -> float:
        """The seconds until the origin may be called again; 0 if it may be called now."""
        return max(0.0, self._until - self._clock())

    def note_failure(self, took: float) -> None:
        """Records a failed call that lasted `took` seconds."""
        self._failed += 1
        doublings = self._failed - self._tolerated - 1
        if doublings >= 0:
            pause = min(FIRST_PAUSE_SECONDS * 2 ** min(doublings, 10), LONGEST_PAUSE_SECONDS)
            self._until = self._clock() + max(pause, min(took, LONGEST_PAUSE_SECONDS))

    def note_success(self) -> None:
        self._failed = 0
        self._until = float("-inf")
