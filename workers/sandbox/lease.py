"""The lease of a host, a file with the time until which the host's apps with data may run.

The worker renews it (`workers/hosting/leases.py`). The keepers read it, and so stop the apps in time if the worker is
dead. The time is that of a clock that runs while the machine sleeps. It means nothing after the machine's next start.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Lease(NamedTuple):
    session: str  # of the host; a lease that ran out is never renewed, and the host begins another session
    ends: float  # seconds since the machine's start


def now() -> float:
    """Returns the seconds since the machine's start."""
    return time.clock_gettime(CLOCK)


def read_lease(path: str | Path) -> Lease | None:
    """Reads the lease. Returns None if there is none, or if the machine has been restarted since it was written."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(Path(path).read_bytes())
        if stored["boot"] == _read_boot_id():
            return Lease(stored["session"], stored["ends"])
    return None


def write_lease(path: Path, lease: Lease) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"boot": _read_boot_id(), "session": lease.session, "ends": lease.ends}))
    fresh.replace(path)


def is_held(path: str | Path) -> bool:
    """Returns whether the lease can be read and has not run out."""
    found = read_lease(path)
    return found is not None and now() < found.ends


def _read_boot_id() -> str:
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""
