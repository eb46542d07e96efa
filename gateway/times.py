"""Reads the times that people name, and the spans between them. The keeper of a sandbox imports this module too."""

import datetime
import math
import re
import time
from typing import NamedTuple

A_TIME = "a time in ISO 8601, such as 2026-07-02 or 2026-07-02T12:00:00Z, or how long ago, such as 30m, 1h or 2d"
UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class TimeSpan(NamedTuple):
    """What is at `since` or later, and before `until`; both in seconds since the epoch."""

    since: float = -math.inf
    until: float = math.inf

    def contains(self, at: float) -> bool:
        return self.since <= at < self.until


ALWAYS = TimeSpan()


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
