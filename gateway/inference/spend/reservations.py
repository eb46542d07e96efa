"""The answers of `admit.lua` and `settle.lua`, and the record that a settlement carries."""

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
    settled: int  # nano-euro of the day under the cap that was checked last; 0 if none was
    used: tuple[int, int, int] = (0, 0, 0)  # nano-euro under the caps of the account, the app and the user, before this


class ReservationRecord(msgspec.Struct, frozen=True, gc=False):
    """A reservation as Redis records it. A settlement carries it, to be booked even if a failover lost it."""

    account: str
    day: str
    max_cost: int  # nano-euro
    expires: int  # Redis's clock, milliseconds
    app: str  # id
    user: str = ""  # its hash, if the app had a cap for users


class Settlement(msgspec.Struct, frozen=True, gc=False):
    outcome: Literal["settled", "recovered", "ended", "unknown"]
    nano_euro: int  # booked by this call
