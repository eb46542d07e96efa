"""Money across failovers: any interleaving of admissions, settlements, repetitions and a replica that takes over.

A failover restores the keys as they were when the replica last replicated from its primary. Later writes are lost:
reservations, settlements, tombstones. In the end, each reservation that a gateway was granted is booked once.
"""

import itertools
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run

from gateway.inference.spend.reservations import ReservationRecord
from tests.lua.scripts import CLOCK, MINUTE, ON_VALKEY, SECOND, Scripts, at
from tests.support.selection import with_more_in_test_all

LIFE_MS = 360_000  # milliseconds
GRACE = 600_000  # milliseconds after it has expired
CAP = 1000
APP_CAP = 700
USER_CAP = 400


@dataclass(frozen=True)
class Granted:
    id: str
    record: ReservationRecord


class Failovers(RuleBasedStateMachine):
    client: Any
    granted = Bundle("granted")

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.scripts = Scripts(self.client)
        self.ids = map("r{}".format, itertools.count())
        self.reservations: list[Granted] = []
        self.booked: dict[str, int] = {}  # reservation → nano-euro, as Redis currently knows
        self.lost = 0  # nano-euro of reservations that Redis has lost, and might grant to others
        self.capped = True  # whether the app has a cap for users

    @initialize(beginning=st.sampled_from(["2026-11-21T12:00:00", "2026-11-21T23:58:00"]))
    def begin(self, beginning: str) -> None:
        self.set_clock(at(beginning))
        self.replicate()

    def set_clock(self, clock: int) -> None:
        """Sets the clock, by which tombstones expire too."""
        self.clock = clock
        self.scripts.set_clock(clock)

    @rule(step=st.sampled_from([1, SECOND, MINUTE, 7 * MINUTE, 11 * MINUTE]))
    def wait(self, step: int) -> None:
        self.set_clock(self.clock + step)
        for reservation in self.reservations:
            if self.clock // 1000 >= reservation.record.expires + GRACE + 60_000:
                self.client.delete(f"{{p38}}:settled:{reservation.id}")

    @rule(capped=st.booleans())
    def change_cap_of_users(self, capped: bool) -> None:
        self.capped = capped

    @rule(target=granted, max_cost=st.integers(1, 300), user=st.sampled_from(["ana", "ben"]))
    def admit(self, max_cost: int, user: str) -> Any:
        reply = self.scripts.admit(
            max_cost,
            user=user,
            reservation=(name := next(self.ids)),
            cap=CAP,
            app_cap=APP_CAP,
            user_cap=USER_CAP if self.capped else None,
            life=LIFE_MS,
            limits=(99, 99),
        )
        if reply.verdict != "ok":
            return multiple()
        payer = user if self.capped else ""
        reservation = Granted(name, ReservationRecord("acc", reply.day, max_cost, reply.now + LIFE_MS, "app", payer))
        self.reservations.append(reservation)
        return reservation

    @rule(reservation=granted, cost=st.integers(0, 400), times=st.integers(1, 3))
    def settle(self, reservation: Granted, cost: int, times: int) -> None:
        """Settles it as its gateway does, which may repeat the call."""
        for _ in range(times):
            outcome, amount = self.scripts.end(reservation.id, cost, reservation.record)
            match outcome:
                case "settled" | "recovered":
                    assert reservation.id not in self.booked
                    assert amount == min(cost, reservation.record.max_cost)
                    self.booked[reservation.id] = amount
                case "ended":
                    assert reservation.id in self.booked
                case _:
                    assert self.clock // 1000 >= reservation.record.expires + GRACE

    @rule()
    def settle_expired(self) -> None:
        """Settles expired reservations as a monitors worker does, which knows only their records."""
        for reservation in self.scripts.list_expired():
            outcome, amount = self.scripts.end(reservation, -1)
            assert (outcome, reservation in self.booked) == ("settled", False)
            self.booked[reservation] = amount

    @rule()
    def replicate(self) -> None:
        names = [key for key in self.client.keys("*") if key.decode() != CLOCK]
        self.replica = [(name, max(self.client.pttl(name), 0), self.client.dump(name)) for name in names]
        self.replicated = dict(self.booked)

    @rule()
    def fail_over(self) -> None:
        before = self.scripts.reservations()
        self.client.flushall()
        for name, lives, value in self.replica:
            self.client.restore(name, lives, value)
        self.set_clock(self.clock)
        self.wait(0)
        self.lost += sum(before[name][2] for name in before.keys() - self.scripts.reservations().keys())
        self.lost += sum(amount for name, amount in self.booked.items() if name not in self.replicated)
        self.booked = dict(self.replicated)

    @invariant()
    def settled_sums_match_the_bookings(self) -> None:
        totals: dict[str, int] = {}
        for reservation in self.reservations:
            day = reservation.record.day
            totals[day] = totals.get(day, 0) + self.booked.get(reservation.id, 0)
        spends, by_app = self.scripts.spends(), self.scripts.app_spends()
        for day, total in totals.items():
            assert by_app.get(("acc", "app", day), (0, 0)) == spends.get(("acc", day), (0, 0))
            settled, reserved = spends.get(("acc", day), (0, 0))
            assert settled == total
            assert reserved == sum(max_cost for _, on, max_cost in self.scripts.reservations().values() if on == day)
            assert settled + reserved <= APP_CAP + self.lost
        self.users_spends_match_the_bookings()

    def users_spends_match_the_bookings(self) -> None:
        expected: dict[tuple[str, ...], list[int]] = {}
        open_records = self.scripts.records()
        for reservation in self.reservations:
            record = reservation.record
            if record.user:
                spend = expected.setdefault(("acc", "app", record.user, record.day), [0, 0])
                spend[0] += self.booked.get(reservation.id, 0)
                spend[1] += record.max_cost if reservation.id in open_records else 0
        spends = self.scripts.user_spends()
        assert {payer: [*spend] for payer, spend in spends.items()} == {k: v for k, v in expected.items() if any(v)}
        assert all(sum(spend) <= USER_CAP + self.lost for spend in spends.values())

    def teardown(self) -> None:
        """Drains the gateways' queues: every reservation ends, and none can end again."""
        for reservation in self.reservations:
            self.settle(reservation, 1, 2)
        self.settled_sums_match_the_bookings()
        for reservation in self.reservations:
            assert reservation.id in self.booked or self.clock // 1000 >= reservation.record.expires + GRACE


@ON_VALKEY
@with_more_in_test_all("examples", 8, 25)
def test_money_moves_once_over_failovers(client: Any, examples: int) -> None:
    machine = type("Failovers", (Failovers,), {"client": client})
    run(machine, settings=settings(max_examples=examples, stateful_step_count=40))
