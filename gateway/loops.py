"""How a process runs: its file descriptors and its memory."""

import gc
import resource

DESCRIPTORS = 65_536  # at most, per process; more would not help on one core
# New objects before a collection. Requests and deliveries leave hardly any cycles. With Python's default of 700,
# the collector would visit the objects of running requests all the time.
YOUNG_OBJECTS = 10_000


def raise_descriptor_limit() -> int:
    """Raises the soft limit, which is 1,024 on most systems, to the hard limit. Returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass  # macOS allows less than it reports; the limit in force applies
    return soft


def freeze_heap() -> None:
    """Exempts all present objects from collection. Each process calls it once it has started."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
