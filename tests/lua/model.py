"""A model of admission in plain Python, with which every server must agree."""

from collections import Counter
from dataclasses import dataclass, field

from tests.lua.scripts import MINUTE, day_of


@dataclass(frozen=True)
class Reservation:
    account: str
    app: str
    user: str  # '' if no cap for users was set
    day: str
    max_cost: int
    expires: int  # milliseconds

    def payers(self) -> list[tuple[str, ...]]:
        """Returns the payers whose day it counts for: the account, its app, and under a cap for users the user."""
        users = [(self.account, self.app, self.user, self.day)] if self.user else []
        return [(self.account, self.day), (self.account, self.app, self.day), *users]


@dataclass
class Window:
    passed: list[int] = field(default_factory=list)

    def recent(self, now: int) -> list[int]:
        """Returns the times in the last 60 seconds. After the clock was set back, times in the future count as now."""
        self.passed = [min(stamp, now) for stamp in self.passed]
        return [stamp for stamp in self.passed if stamp > now - MINUTE]

    def frees(self, now: int, limit: int) -> int:
        """Returns the microseconds until a request can pass again, or until the first slot is free."""
        recent = self.recent(now)
        return recent[max(len(recent) - max(limit, 1), 0)] + MINUTE - now if recent else 0

    def add(self, now: int) -> None:
        self.passed.append(now)

    def forget(self, now: int) -> None:
        self.passed = self.recent(now)


@dataclass
class Model:
    clock: int
    windows: dict[str, Window] = field(default_factory=dict)
    settled: Counter[tuple[str, ...]] = field(default_factory=Counter)
    open: dict[str, Reservation] = field(default_factory=dict)

    def window(self, name: str) -> Window:
        window = self.windows.setdefault(name, Window())
        window.forget(self.clock)
        return window

    def reserved(self, payer: tuple[str, ...]) -> int:
        return sum(r.max_cost for r in self.open.values() if payer in r.payers())

    def verdict(
        self,
        app: str,
        user: str,
        account: str,
        max_cost: int,
        limits: tuple[int, int],
        caps: tuple[int, int | None, int | None],
        deadline: int,
    ) -> str:
        """Returns the expected verdict. `caps` are the account's, the app's and the user's."""
        if deadline and self.clock >= deadline * 1000:
            return "late"
        if len(self.window(app).recent(self.clock)) >= limits[0]:
            return "app"
        if len(self.window(f"{app}:{user}").recent(self.clock)) >= limits[1]:
            return "user"
        day = day_of(self.clock)
        payers = [(account, day), (account, app, day), (account, app, user, day)]
        for verdict, payer, cap in zip(("cap", "app_cap", "user_cap"), payers, caps, strict=True):
            used = self.settled[payer] + self.reserved(payer)
            if cap is not None and (used >= cap or used + max_cost > cap):
                return verdict
        return "ok"

    def admit(self, app: str, user: str, account: str, max_cost: int, reservation: str, life: int, payer: str) -> None:
        """Records a request that passes. `payer` is the user, if a cap for users is set."""
        self.window(app).add(self.clock)
        self.window(f"{app}:{user}").add(self.clock)
        if max_cost:
            end = self.clock // 1000 + life
            self.open[reservation] = Reservation(account, app, payer, day_of(self.clock), max_cost, end)

    def settle(self, reservation: str, cost: int) -> int:
        ended = self.open.pop(reservation, None)
        if ended is None:
            return -1
        charged = ended.max_cost if cost < 0 else min(cost, ended.max_cost)
        for payer in ended.payers():
            self.settled[payer] += charged
        return charged

    def list_expired(self) -> set[str]:
        return {key for key, r in self.open.items() if r.expires <= self.clock // 1000}

    def spends(self) -> dict[tuple[str, ...], tuple[int, int]]:
        """Returns the spends that are not zero, by payer and day."""
        payers = {*self.settled, *(payer for r in self.open.values() for payer in r.payers())}
        found = {payer: (self.settled[payer], self.reserved(payer)) for payer in payers}
        return {k: v for k, v in found.items() if v != (0, 0)}
