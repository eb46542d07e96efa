"""Makes the identifiers and times of responses, records and logs, and reads the times that people name."""

import datetime
import math
import random
import re
import secrets
import time
from typing import Annotated, NamedTuple

from msgspec import Meta

Time = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")]  # as `now_iso` formats it

A_TIME = "a time in ISO 8601, such as 2026-07-02 or 2026-07-02T12:00:00Z, or how long ago, such as 30m, 1h or 2d"
EPOCH = datetime.datetime(1970, 1, 1)  # in UTC
UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


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
    """Formats `seconds` since the epoch, or the current time, as ISO 8601 UTC with milliseconds and Z.

    Raises OverflowError for a time that is not in the years 1 to 9999.
    """
    millis = round((time.time() if seconds is None else seconds) * 1000)
    return (EPOCH + datetime.timedelta(milliseconds=millis)).isoformat(timespec="milliseconds") + "Z"


def seconds_of(iso: str) -> float:
    """Returns the seconds since the epoch of a time that `now_iso` formats."""
    return datetime.datetime.fromisoformat(iso).timestamp()


def day_of(milliseconds: int) -> str:
    """Returns the UTC day of a time since the epoch, such as `2026-07-02`."""
    return time.strftime("%Y-%m-%d", time.gmtime(milliseconds // 1000))


def read_time(text: str) -> float:
    """Returns the seconds since the epoch of a time in ISO 8601, in UTC unless it has an offset, or of `1h` ago.

    Raises ValueError.
    """
    if ago := re.fullmatch(r"(\d{1,6})([smhd])", text, re.ASCII):
        return max(0.0, time.time() - int(ago[1]) * UNITS[ago[2]])
    try:
        moment = datetime.datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
    except OverflowError as error:
        raise ValueError(text) from error


class TimeSpan(NamedTuple):
    """What is at `since` or later, and before `until`; both in seconds since the epoch."""

    since: float = -math.inf
    until: float = math.inf

    def contains(self, at: float) -> bool:
        return self.since <= at < self.until


ALWAYS = TimeSpan()
