"""Any interleaving of admissions, settlements, clock steps and changes of limits, against the model."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run

from tests.lua.scripts import DAY, MINUTE, ON_VALKEY, SECOND, TAG, Reply, Scripts, at, day_of
from tests.support.selection import with_more_in_test_all

ACCOUNT_OF = {"shop": "acc_1", "blog": "acc_1", "forum": "acc_2"}
BEGINNINGS = ("1970-01-02T00:00:00", "2024-02-28T23:59:59.999", "2025-12-31T23:59:30", "2026-11-21T12:00:00.000001")
STEPS = (0, 1, 999, 1000, SECOND, MINUTE - SECOND, MINUTE - 1, MINUTE, MINUTE + 1, 360 * SECOND, DAY, 3 * DAY)
LARGE = 10**15  # nano-euro: the largest cap that the settings take
LIFE_MS = 360_000  # milliseconds

steps = st.sampled_from(STEPS) | st.integers(0, 2 * MINUTE)
caps = st.sampled_from([0, 1, 100, 1000, LARGE]) | st.integers(0, 500)
own_caps = st.none() | caps
max_costs = st.sampled_from([0, 0, 1, 99, 100, 101, LARGE // 3, LARGE]) | st.integers(1, 300)
costs = st.sampled_from(["nothing", "one", "below", "equal", "above", "maximum"])


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
    """Admission in plain Python, with which every server must agree."""

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


class Admissions(RuleBasedStateMachine):
    client: Any
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.scripts = Scripts(self.client)
        self.ids = map("r{}".format, itertools.count())
        self.limits = (3, 2)
        self.caps = {"acc_1": 1000, "acc_2": 100}
        self.app_caps: dict[str, int | None] = {"shop": 500, "blog": None, "forum": 80}
        self.user_caps: dict[str, int | None] = {"shop": 300, "blog": 200, "forum": None}
        self.highest: dict[tuple[str, ...], float] = {}  # cap under which the day's money was reserved

    @initialize(beginning=st.sampled_from(BEGINNINGS))
    def begin(self, beginning: str) -> None:
        self.model = Model(at(beginning))
        self.set_clock(self.model.clock)

    def set_clock(self, clock: int) -> None:
        self.model.clock = clock
        self.scripts.set_clock(clock)

    @rule(step=steps)
    def forward(self, step: int) -> None:
        self.set_clock(self.model.clock + step)

    @rule(step=steps)
    def backward(self, step: int) -> None:
        self.set_clock(max(self.model.clock - step, DAY))

    @rule(before=st.sampled_from([0, 1, 1000]))
    def to_midnight(self, before: int) -> None:
        self.set_clock((self.model.clock // DAY + 1) * DAY - before)

    @rule(app=st.integers(0, 4), user=st.integers(0, 4))
    def change_limits(self, app: int, user: int) -> None:
        self.limits = (app, user)

    @rule(account=st.sampled_from(["acc_1", "acc_2"]), cap=caps)
    def change_cap(self, account: str, cap: int) -> None:
        self.caps[account] = cap

    @rule(app=st.sampled_from([*ACCOUNT_OF]), cap=own_caps)
    def change_cap_of_app(self, app: str, cap: int | None) -> None:
        self.app_caps[app] = cap

    @rule(app=st.sampled_from([*ACCOUNT_OF]), cap=own_caps)
    def change_cap_of_users(self, app: str, cap: int | None) -> None:
        self.user_caps[app] = cap

    @rule(
        target=reservations,
        app=st.sampled_from([*ACCOUNT_OF]),
        user=st.sampled_from(["ana", "ben"]),
        max_cost=max_costs,
        waits=st.booleans(),
        in_time=st.sampled_from([None, None, None, 0, 1, 2000, -1]),
    )
    def admit(self, app: str, user: str, max_cost: int, waits: bool, in_time: int | None) -> Any:
        deadline = 0 if in_time is None else self.model.clock // 1000 + in_time
        reply, reservation = self.ask(app, user, max_cost, deadline)
        if waits and reply.verdict in ("app", "user"):
            self.wait_until_free(app, user, reply)
        return reservation if reply.verdict == "ok" and max_cost else multiple()

    def ask(self, app: str, user: str, max_cost: int, deadline: int = 0) -> tuple[Reply, str]:
        model, account, reservation = self.model, ACCOUNT_OF[app], next(self.ids)
        caps = (self.caps[account], self.app_caps[app], self.user_caps[app])
        expected = model.verdict(app, user, account, max_cost, self.limits, caps, deadline)
        day, spends = day_of(model.clock), model.spends()
        payers = [(account, day), (account, app, day), (account, app, user, day)]
        used = [0 if cap is None else sum(spends.get(payer, (0, 0))) for payer, cap in zip(payers, caps, strict=True)]
        reply = self.scripts.admit(
            max_cost,
            app=app,
            user=user,
            account=account,
            limits=self.limits,
            cap=caps[0],
            app_cap=caps[1],
            user_cap=caps[2],
            reservation=reservation,
            life=LIFE_MS,
            deadline=deadline,
        )
        assert (reply.day, reply.now) == (day, model.clock // 1000)
        assert [reply.used, reply.app_used, reply.user_used] == used
        assert reply.verdict == expected
        if reply.verdict == "ok":
            model.admit(app, user, account, max_cost, reservation, LIFE_MS, user if caps[2] is not None else "")
            # Without a cap an app's spend is still counted, a user's is not.
            limits = (caps[0], math.inf if caps[1] is None else caps[1], 0 if caps[2] is None else caps[2])
            for payer, limit in zip(payers, limits, strict=True):
                self.highest[payer] = max(limit, self.highest.get(payer, 0))
        for window, limit, count, frees in (
            (model.window(app), self.limits[0], reply.app_count, reply.app_frees_in),
            (model.window(f"{app}:{user}"), self.limits[1], reply.user_count, reply.user_frees_in),
        ):
            assert count == len(window.recent(model.clock))
            assert frees == window.frees(model.clock, limit)
        return reply, reservation

    def wait_until_free(self, app: str, user: str, reply: Reply) -> None:
        """Checks that the limit refuses until one microsecond before the given time, and not at that time."""
        if 0 in self.limits:
            return  # nothing ever passes
        frees = reply.app_frees_in if reply.verdict == "app" else reply.user_frees_in
        self.set_clock(self.model.clock + frees - 1)
        assert self.ask(app, user, 0)[0].verdict == reply.verdict
        self.set_clock(self.model.clock + 1)
        assert self.ask(app, user, 0)[0].verdict != reply.verdict

    @rule(reservation=reservations, cost=costs)
    def settle(self, reservation: str, cost: str) -> None:
        max_cost = self.model.open[reservation].max_cost if reservation in self.model.open else 50
        amounts = {"nothing": 0, "one": 1, "below": max_cost - 1, "equal": max_cost, "above": max_cost * 2 + 1}
        amount = amounts.get(cost, -1)
        assert self.scripts.settle(reservation, amount) == self.model.settle(reservation, amount)

    @rule(reservation=consumes(reservations))
    def release(self, reservation: str) -> None:
        assert self.scripts.settle(reservation, 0) == self.model.settle(reservation, 0)

    @rule(cost=st.integers(-1, 100))
    def settle_unknown(self, cost: int) -> None:
        assert self.scripts.settle("never-made", cost) == -1

    @rule()
    def settle_expired(self) -> None:
        expired = self.scripts.list_expired()
        assert set(expired) == self.model.list_expired()
        ends = [self.model.open[reservation].expires for reservation in expired]
        assert ends == sorted(ends)
        for reservation in expired:
            assert self.scripts.settle(reservation, -1) == self.model.settle(reservation, -1)

    @invariant()
    def money_is_as_in_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        spends = {**self.scripts.spends(), **self.scripts.app_spends(), **self.scripts.user_spends()}
        assert spends == self.model.spends()
        for payer, (settled, reserved) in spends.items():
            assert settled >= 0
            assert reserved >= 0
            assert settled + reserved <= self.highest[payer]
        made = self.scripts.reservations()
        assert made == {key: (r.account, r.day, r.max_cost) for key, r in self.model.open.items()}
        assert self.scripts.expirations() == {key: r.expires for key, r in self.model.open.items()}

    @invariant()
    def keys_end_and_lie_in_one_slot(self) -> None:
        for key, expiry in self.scripts.expiries().items():
            assert key.startswith(f"{TAG}:")
            assert key.count("{") == key.count("}") == 1
            if key in (f"{TAG}:reservations", f"{TAG}:leases"):
                assert expiry == -1
            elif ":settled:" in key:
                assert expiry > 0
            else:
                assert 0 < expiry <= (60 if ":window:" in key else 35 * 86_400)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            for reservation in [*self.model.open]:
                assert self.scripts.settle(reservation, -1) == self.model.settle(reservation, -1)
            self.money_is_as_in_the_model()
            assert not self.scripts.reservations()


@ON_VALKEY
@with_more_in_test_all("examples", 12, 40)
def test_any_interleaving(client: Any, examples: int) -> None:
    machine = type("Admissions", (Admissions,), {"client": client})
    run(machine, settings=settings(max_examples=examples, stateful_step_count=40))
