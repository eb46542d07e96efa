"""Runs a test on an event loop whose time jumps to the next timer whenever nothing else is left to do.

Such a test takes only as long as its computation, and a busy machine does not change the times that it measures. It
must not do I/O that the loop waits for.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

START = 1_000_000.0  # seconds
# A wait shorter than the time can express would never end. After so many turns at one time, it makes a small step.
TURNS, STEP_SECONDS = 1_000, 1e-9


class VirtualSelector(selectors.DefaultSelector):
    """Advances the time instead of waiting."""

    now, turns = START, 0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0 if timeout else timeout)
        self.turns += 1
        if not events and timeout:
            self.now, self.turns = self.now + timeout, 0
        elif self.turns > TURNS:
            self.now, self.turns = self.now + STEP_SECONDS, 0
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a test of an async function that runs in virtual time. Its fixtures must not be async."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **fixtures))

    return run
