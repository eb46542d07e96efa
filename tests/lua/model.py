"""Admission as the interface tells it, in plain Python: what every server must agree with."""

from collections import Counter
from dataclasses import dataclass, field

from tests.lua.scripts import MINUTE, day_of


@dataclass(frozen=True)
class Reservation:
    account: str
    day: str
    bound: int
    lease_end: int  # milliseconds


@dataclass
class Window:
    passed: list[int] = field(default_factory=list)

    def recent(self, now: int) -> list[int]:
        """What lies in the 60 seconds that end now. After the clock was set back, stamps of the future are of now."""
        self.passed = [min(stamp, now) for stamp in self.passed]
        return [stamp for stamp in self.passed if stamp > now - MINUTE]

    def frees(self, now: int, limit: int) -> int:
        """Microseconds until a request can pass again, or until the first slot frees."""
        recent = self.recent(now)
        return recent[max(len(recent) - limit, 0)] + MINUTE - now if recent else 0

    def add(self, now: int) -> None:
        self.passed.append(now)

    def forget(self, now: int) -> None:
        self.passed = self.recent(now)


@dataclass
class Model:
    clock: int
    windows: dict[str, Window] = field(default_factory=dict)
    settled: Counter[tuple[str, str]] = field(default_factory=Counter)
    open: dict[str, Reservation] = field(default_factory=dict)

    def window(self, name: str) -> Window:
        window = self.windows.setdefault(name, Window())
        window.forget(self.clock)
        return window

    def reserved(self, account: str, day: str) -> int:
        return sum(r.bound for r in self.open.values() if (r.account, r.day) == (account, day))

    def verdict(
        self, app: str, user: str, account: str, bound: int, limits: tuple[int, int], cap: int, latest: int
    ) -> str:
        if latest and self.clock > latest * 1000:
            return "late"
        if len(self.window(app).recent(self.clock)) >= limits[0]:
            return "app"
        if len(self.window(user).recent(self.clock)) >= limits[1]:
            return "user"
        day = day_of(self.clock)
        used = self.settled[account, day] + self.reserved(account, day)
        return "cap" if used >= cap or used + bound > cap else "ok"

    def admit(self, app: str, user: str, account: str, bound: int, reservation: str, lease: int) -> None:
        self.window(app).add(self.clock)
        self.window(user).add(self.clock)
        if bound:
            end = self.clock // 1000 + lease
            self.open[reservation] = Reservation(account, day_of(self.clock), bound, end)

    def settle(self, reservation: str, cost: int) -> int:
        ended = self.open.pop(reservation, None)
        if ended is None:
            return -1
        charged = ended.bound if cost < 0 else min(cost, ended.bound)
        self.settled[ended.account, ended.day] += charged
        return charged

    def overdue(self) -> set[str]:
        return {key for key, r in self.open.items() if r.lease_end <= self.clock // 1000}

    def spends(self) -> dict[tuple[str, str], tuple[int, int]]:
        keys = {*self.settled, *((r.account, r.day) for r in self.open.values())}
        found = {(account, day): (self.settled[account, day], self.reserved(account, day)) for account, day in keys}
        return {k: v for k, v in found.items() if v != (0, 0)}
