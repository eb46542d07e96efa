"""A higher priority for tests that measure how long somebody else waits, while other tests run beside them."""

import contextlib
import os
from collections.abc import Iterator

RAISED = -15


@contextlib.contextmanager
def raised_priority() -> Iterator[None]:
    """Of this thread, and of what it starts meanwhile. Without the permission, nothing changes."""
    former = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(RAISED, former))
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, former)
