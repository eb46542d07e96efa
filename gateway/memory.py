"""How often Python's garbage collector looks for cycles."""

from __future__ import annotations

import gc

# Objects that may be new before it looks at them. Requests and deliveries leave hardly any cycles behind, and with
# Python's 700 it would visit those that are under way all the time.
YOUNG = 10_000


def freeze_heap() -> None:
    """To be called when a process has started: what exists by then stays, and need not be visited again."""
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
