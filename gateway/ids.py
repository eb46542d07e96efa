"""Makes the identifiers and times of responses, records and logs."""

import datetime
import random
import re
import secrets
import time
from typing import Annotated

from msgspec import Meta

Time = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")]  # as `now_iso` formats it


def new_id(kind: str) -> str:
    """Returns an id such as `acc_01kad0e5q3f8…`: a time, by which ids sort, and random digits."""
    return f"{kind}_{int(time.time() * 1000):011x}{secrets.token_hex(5)}"


def time_of(made_id: str) -> int | None:
    """Returns when `new_id` made this id, in milliseconds since the epoch; None for any other text."""
    found = re.fullmatch(r"[a-z]+_([0-9a-f]{11})[0-9a-f]{10}", made_id)
    return int(found[1], 16) if found else None


def request_id() -> str:
    """Returns 80 random bits in hexadecimal. A request id is not secret, so it needs no system call for randomness."""
    return f"{random.getrandbits(80):020x}"


def now_iso(seconds: float | None = None) -> str:
    """Formats `seconds` since the epoch, or the current time, as ISO 8601 UTC with milliseconds and Z."""
    whole, millis = divmod(round((time.time() if seconds is None else seconds) * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{millis:03d}Z"


def seconds_of(iso: str) -> float:
    """Returns the seconds since the epoch of a time that `now_iso` formats."""
    return datetime.datetime.fromisoformat(iso).timestamp()


def day_of(milliseconds: int) -> str:
    """Returns the UTC day of a time since the epoch, such as `2026-07-02`."""
    return time.strftime("%Y-%m-%d", time.gmtime(milliseconds // 1000))
