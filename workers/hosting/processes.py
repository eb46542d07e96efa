"""Recognizes processes that outlive the worker that started them."""

import os
import sys
from contextlib import suppress
from pathlib import Path


def start_time(pid: int) -> int | None:
    """Returns the start time of a process in clock ticks since boot; None if it has ended.

    It distinguishes the process from a later process with the same id.
    """
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] == b"Z" else int(fields[19])
    if sys.platform != "linux":
        with suppress(OSError):
            os.kill(pid, 0)
            return 0
    return None


def is_running(pid: int, began: int) -> bool:
    return pid != 0 and start_time(pid) == began
