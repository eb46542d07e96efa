"""Leases under any interleaving of grants, returns, deaths, lost and late calls, answers and messages.

Each process has a `Lease` as in production. Its calls may run late, after it has given up on them, or never. Answers
and messages may be lost, and messages may come late and in any order. A process may stop for a time, or die.
"""

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from gateway.inference.concurrency.lease import LeaseCall as Call
from gateway.inference.concurrency.lease import PermitLease
from tests.lua.leases import CHANNEL, LEASE, Demand, Provider
from tests.lua.scripts import ON_VALKEY
from tests.support.selection import with_more_in_test_all

LIMIT = 6
NAMES = ("p0", "p1", "p2", "p3")
STEPS = (0.001, 0.3, 1.1, 2.0, 5.0, 9.0, 11.0, 26.9, 28.0, 40.0, 100.0)

names = st.sampled_from(NAMES)


class Sim:
    """One process, and the network to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lease = PermitLease(LEASE)
        self.waiting: Counter[str] = Counter()
        self.pending: tuple[Call, Demand, int, bool] | None = None  # the call that waits for its answer
        self.answer: Any = None  # to the pending call
        self.inbox: list[str] = []

    def held(self, now: float) -> int:
        """Returns the number of permits with which it may serve requests."""
        return self.lease.used + (self.lease.spare if now < self.lease.ends else 0)


class Leases(RuleBasedStateMachine):
    client: Any

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.provider = Provider(self.client, LIMIT)
        self.living = {name: Sim(name) for name in NAMES}
        self.abandoned: list[tuple[str, Call, Demand, int, bool]] = []  # calls on which their process has given up
        # After a cut, or a lease that ended with permits in use, more permits may be held than the limit.
        self.overdrawn = False
        self.births = 0

    @property
    def now(self) -> float:
        return self.provider.now

    # -- time, life and death --------------------------------------------------------------------------------

    @rule(step=st.sampled_from(STEPS))
    def time_passes(self, step: float) -> None:
        self.provider.set_clock(self.now + step)

    @rule(name=names)
    def die(self, name: str) -> None:
        """Replaces the process by a new one."""
        sim = self.living.pop(name)
        if sim.pending and sim.answer is None:
            self.abandoned.append((sim.name, *sim.pending))
        self.births += 1
        self.living[name] = Sim(f"{name}-{self.births}")

    @rule(names=st.sets(names, min_size=1), step=st.sampled_from([9.0, 29.0, 40.0]))
    def redis_is_away(self, names: set[str], step: float) -> None:
        """Leaves calls in the buffers of abandoned connections; they may run once Redis is back."""
        for name in sorted(names):
            self.send(name, 1, 0, False)
            self.give_up(name)
        self.time_passes(step)

    # -- requests --------------------------------------------------------------------------------------------

    @rule(name=names, account=st.sampled_from("ab"), count=st.integers(1, 4))
    def join(self, name: str, account: str, count: int) -> None:
        self.living[name].waiting[account] += count

    @rule(name=names, account=st.sampled_from("ab"))
    def leave(self, name: str, account: str) -> None:
        self.living[name].waiting[account] = 0

    @rule(name=names, count=st.integers(1, 4))
    def take(self, name: str, count: int) -> None:
        lease = self.living[name].lease
        for _ in range(count):
            taken = lease.take(self.now)
            assert self.now < lease.ends or not taken

    @rule(name=names, count=st.integers(1, 4))
    def free(self, name: str, count: int) -> None:
        for _ in range(min(count, self.living[name].lease.used)):
            self.living[name].lease.release()

    # -- the network -----------------------------------------------------------------------------------------

    @rule(
        name=names,
        give_back=st.integers(0, 4),
        want=st.sampled_from([0, 0, 3, 9]),
        cut=st.sampled_from([False] * 9 + [True]),
    )
    def send(self, name: str, give_back: int, want: int, cut: bool) -> None:
        sim = self.living[name]
        if sim.pending is None:
            demand: Demand = {account: (1, count) for account, count in sim.waiting.items()}
            sim.pending = (sim.lease.call(self.now, give_back, sim.waiting.total()), demand, want, cut)

    @rule(name=names)
    def arrive(self, name: str) -> None:
        sim = self.living[name]
        if sim.pending and sim.answer is None:
            sim.answer = self.execute(sim.name, *sim.pending)

    @precondition(lambda self: self.abandoned)
    @rule(data=st.data())
    def arrive_late(self, data: Any) -> None:
        self.execute(*self.abandoned.pop(data.draw(st.integers(0, len(self.abandoned) - 1))))

    @rule(name=names)
    def receive_answer(self, name: str) -> None:
        sim = self.living[name]
        if sim.answer is not None:
            assert sim.pending
            call, answer = sim.pending[0], sim.answer
            sim.pending = sim.answer = None
            if sim.lease.renew(call, self.now):
                self.accept(sim, call.epoch, answer.before, answer.labels)
                for account, excess in answer.excess.items():
                    sim.waiting[account] = max(0, sim.waiting[account] - excess)

    @rule(name=names)
    def give_up(self, name: str) -> None:
        """Loses the connection. The call may have run already, run later, or never run."""
        sim = self.living[name]
        if sim.pending and sim.answer is None:
            self.abandoned.append((sim.name, *sim.pending))
        sim.pending = sim.answer = None

    @rule(name=names, data=st.data(), way=st.sampled_from(["once", "again", "never"]))
    def receive_message(self, name: str, data: Any, way: str) -> None:
        sim = self.living[name]
        if sim.inbox:
            n = data.draw(st.integers(0, len(sim.inbox) - 1))
            text = sim.inbox[n] if way == "again" else sim.inbox.pop(n)
            if way != "never":
                epoch, before, *labels = text.split(" ")
                self.accept(sim, int(epoch), int(before), labels)

    @rule(name=names, count=st.integers(1, 9), want=st.sampled_from([0, 9]))
    def call(self, name: str, count: int, want: int) -> None:
        """Makes a complete call without faults that returns spare permits, as most calls are."""
        sim = self.living[name]
        if sim.pending is None:
            self.send(name, count, want, False)
            self.arrive(name)
            self.receive_answer(name)

    @rule(name=names, want=st.sampled_from([0, 9]), step=st.sampled_from([1.1, 20.0, 27.0, 40.0]))
    def call_slowly(self, name: str, want: int, step: float) -> None:
        """Makes a call with a slow answer, while the other processes continue."""
        if self.living[name].pending is None:
            self.send(name, 0, want, False)
            self.arrive(name)
            end = self.now + step
            while self.now < end:
                self.time_passes(min(8.0, end - self.now))
                for other in NAMES:
                    self.call(other, 1, 0)
            self.receive_answer(name)

    @rule(names=st.permutations(NAMES))
    def pass_by_message(self, names: list[str]) -> None:
        """Lets one process hold all permits, and another one get the returned permits by a message."""
        holder, waiter = names[0], names[1]
        self.join(holder, "a", LIMIT)
        self.call(holder, 0, 0)
        self.join(waiter, "b", 3)
        self.call(waiter, 9, 0)
        self.free(holder, 2)
        self.call(holder, 2, 0)

    def accept(self, sim: Sim, epoch: int, before: int, labels: list[str]) -> None:
        for account in sim.lease.accept(epoch, before, labels, self.now) or []:
            if sim.waiting[account] > 0 and sim.lease.take(self.now):
                sim.waiting[account] -= 1

    def execute(self, name: str, call: Call, demand: Demand, want: int, cut: bool) -> Any:
        before, held = self.provider.records(), self.provider.held()
        answer, messages = self.provider.call(name, call, demand, want=want, cut=cut)
        after = self.provider.records()
        if answer is None:
            assert after.items() >= {name: before[name]}.items()
            return None
        old = before.get(name)
        if old is None or old[0] != call.epoch:
            self.overdrawn = self.overdrawn or call.granted > call.returned
        self.overdrawn = self.overdrawn or answer.in_force < held
        grants = 0
        for process, (epoch, _, granted, *_) in after.items():
            known = call.granted if process == name else 0
            same = process in before and before[process][0] == epoch
            grants += granted - max(known, before[process][2] if same else 0)
        # A grant always fits within the limit.
        assert not grants or self.provider.held() <= answer.in_force
        if self.provider.held() <= answer.in_force:
            self.overdrawn = self.overdrawn and self.held() > LIMIT
        for channel, text in messages:
            for sim in self.living.values():
                if channel == f"{CHANNEL}:{sim.name}":
                    sim.inbox.append(text)
        return answer

    # -- invariants ------------------------------------------------------------------------------------------

    def held(self) -> int:
        return sum(sim.held(self.now) for sim in self.living.values())

    @invariant()
    def no_process_believes_to_hold_more_than_redis_knows(self) -> None:
        records = self.provider.records()
        for sim in self.living.values():
            if self.now < sim.lease.ends:
                epoch, _, granted, returned, *_ = records[sim.name]
                if sim.pending and sim.lease.is_new:
                    continue  # the call with the new epoch has not arrived yet
                assert epoch == sim.lease.epoch
                assert sim.held(self.now) <= granted - returned

    @invariant()
    def the_limit_holds(self) -> None:
        in_lease = [sim for sim in self.living.values() if self.now < sim.lease.ends]
        if not self.overdrawn:
            assert sum(sim.held(self.now) for sim in in_lease) <= LIMIT

    @invariant()
    def counts_are_never_negative(self) -> None:
        for sim in self.living.values():
            assert sim.lease.spare >= 0
            assert sim.lease.used >= 0
        assert all(granted >= returned for _, _, granted, returned, *_ in self.provider.records().values())

    def teardown(self) -> None:
        """Checks that all permits can be granted once the network works again."""
        for sim in self.living.values():
            sim.pending = sim.answer = None
            sim.waiting.clear()
            while sim.lease.used:
                sim.lease.release()
        for _ in range(40):  # every 2 s: dead processes lose their permits, and the limit grows back after a cut
            self.provider.set_clock(self.now + 2.0)
            for name in NAMES:
                self.call(name, 99, 0)
        assert self.provider.held() == 0
        assert self.provider.waiting() == {}
        self.living["p0"].waiting["a"] = LIMIT + 3
        self.call("p0", 0, 0)
        assert self.living["p0"].lease.used == LIMIT
        self.client.flushall()


@ON_VALKEY
@with_more_in_test_all("examples", 8, 30)
def test_any_interleaving(client: Any, examples: int) -> None:
    machine = type("Leases", (Leases,), {"client": client})
    run(machine, settings=settings(max_examples=examples, stateful_step_count=50))
