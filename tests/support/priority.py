"""Raises the priority of tests that measure waiting times while other tests run."""

import contextlib
import os
from collections.abc import Iterator

RAISED = -15


@contextlib.contextmanager
def raised_priority() -> Iterator[None]:
    """Raises the priority of this thread and of what it starts. Without the permission, nothing changes."""
    former = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(RAISED, former))
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, former)
