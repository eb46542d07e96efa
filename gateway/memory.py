"""Tunes Python's garbage collector."""

from __future__ import annotations

import gc

# New objects before a collection. Requests and deliveries leave hardly any cycles. With Python's default of 700, the
# collector would visit the objects of running requests all the time.
YOUNG_OBJECTS = 10_000


def freeze_heap() -> None:
    """Exempts all present objects from collection. Each process calls it once it has started."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
