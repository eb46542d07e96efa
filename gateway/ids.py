"""Identifiers and times, as they appear in answers, records and logs."""

from __future__ import annotations

import random
import re
import secrets
import time


def new_id(kind: str) -> str:
    """Such as `acc_01kad0e5q3f8…`: sorts by time, then random."""
    return f"{kind}_{int(time.time() * 1000):011x}{secrets.token_hex(5)}"


def time_of(made: str) -> int | None:
    """When `new_id` made this id, in milliseconds since the epoch; None if it did not."""
    found = re.fullmatch(r"[a-z]+_([0-9a-f]{11})[0-9a-f]{10}", made)
    return int(found[1], 16) if found else None


def request_id() -> str:
    """80 random bits. A request id is no secret, so it avoids the system call that secure randomness costs."""
    return f"{random.getrandbits(80):020x}"


def now_iso(seconds: float | None = None) -> str:
    """ISO 8601 UTC with milliseconds and Z; of `seconds` since the epoch, or of now."""
    whole, millis = divmod(round((time.time() if seconds is None else seconds) * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{millis:03d}Z"


def day_of(milliseconds: int) -> str:
    """The UTC day of a time since the epoch, such as `2026-07-02`."""
    return time.strftime("%Y-%m-%d", time.gmtime(milliseconds // 1000))
