"""What `admit.lua` and `settle.lua` answer, and what a settlement says of its reservation."""

from __future__ import annotations

from typing import Literal

import msgspec


class Window(msgspec.Struct, frozen=True, gc=False):
    count: int  # requests that passed in the last 60 seconds, this one included
    frees_in: int  # microseconds until a slot frees


class Decision(msgspec.Struct, frozen=True, gc=False):
    verdict: Literal["ok", "app", "user", "cap", "app_cap", "user_cap", "late"]
    day: str  # UTC, by Redis's clock
    app: Window
    user: Window
    now: int  # Redis's clock, milliseconds
    settled: int  # of the day, nano-euro, under the cap that was asked last; 0 where none was


class ReservationRecord(msgspec.Struct, frozen=True, gc=False):
    """What Redis knows of a reservation, so that a settlement can be booked if a failover lost it."""

    account: str
    day: str
    bound: int  # nano-euro
    lease_end: int  # Redis's clock, milliseconds
    app: str  # id
    user: str = ""  # its hash, if the app had a cap for users


class Settlement(msgspec.Struct, frozen=True, gc=False):
    outcome: Literal["settled", "recovered", "ended", "unknown"]
    nano_euro: int  # that this call booked
