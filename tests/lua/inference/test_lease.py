"""lease.lua, one rule at a time. test_lease_machine.py tests any interleaving."""

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.inference.concurrency.fair_queue import FairQueue
from gateway.inference.concurrency.lease import BudgetCall, LeaseAnswer, LeaseCall, QuotaCall
from gateway.keys import lease_keys
from tests.lua.leases import Demand, Process, Provider
from tests.lua.scripts import ON_VALKEY


@pytest.fixture
def provider(client: Any) -> Provider:
    return Provider(client, limit=4)


def processes(provider: Provider, *names: str) -> list[Process]:
    return [Process(provider, name) for name in names]


def use(process: Process, count: int = 1) -> None:
    for _ in range(count):
        assert process.lease.take(process.provider.now)


def release(process: Process, count: int = 1) -> None:
    for _ in range(count):
        process.lease.release()


def test_after_data_loss_nothing_is_granted_until_the_leases_are_renewed(provider: Provider, client: Any) -> None:
    one, two, new = processes(provider, "one", "two", "new")
    one.call({"a": (1, 2)}, waiting=2)
    use(one, 2)
    two.call({"b": (1, 2)}, waiting=2)
    use(two, 2)
    clock = provider.now
    client.flushall()
    provider.set_clock(clock + 1)
    assert two.call({"b": (1, 1)}, waiting=1) == []
    assert new.call({"c": (1, 1)}, waiting=1) == []
    one.call()
    assert provider.held() == 4
    provider.set_clock(clock + 7)
    assert new.call({"c": (1, 1)}, waiting=1) == []


@pytest.mark.parametrize(("limit", "grows"), [(100, 1), (1_000, 10)])
def test_a_cut_halves_once_a_second_and_grows_back(client: Any, limit: int, grows: int) -> None:
    """A large limit grows by a hundredth each second."""
    provider = Provider(client, limit=limit)
    (one,) = processes(provider, "one")

    def in_force(seconds: float = 0.0, *, cut: bool = False) -> int:
        provider.set_clock(provider.now + seconds)
        one.call(cut=cut)
        return one.answer.in_force

    assert [in_force(), in_force(cut=True)] == [limit, limit // 2]
    assert one.answer.frees_in == 1 / grows
    assert in_force(0.0, cut=True) == limit // 2
    assert in_force(0.999, cut=True) == limit // 2 + grows - 1
    assert in_force(0.001, cut=True) == (limit // 2 + grows) // 2
    for _ in range(10):
        before = in_force(1)
        assert in_force(cut=True) == max(1, before // 2)
    lowest = in_force()
    assert lowest <= 2 * grows
    assert [in_force(1) for _ in range(110)] == [min(limit, lowest + grows * second) for second in range(1, 111)]


@pytest.mark.parametrize("rated", [False, True])
def test_a_late_call_changes_nothing(provider: Provider, client: Any, rated: bool) -> None:
    """A later call has overtaken it, or it arrives again because its answer was lost, or it is of an earlier lease."""
    quotas = QuotaCall(5, 0, 0, 1, 2), QuotaCall(9_000, 0, 0, 50, 100)

    def call(epoch: int, number: int, waiting: int) -> LeaseAnswer | None:
        lease = LeaseCall(epoch, number, granted=0, returned=0, used=0, waiting=waiting, sent=provider.now)
        demand: Demand = {"a": (1, waiting, 0, 10) if rated else (1, waiting)}
        budget = BudgetCall(60_000, False, *quotas) if rated else None
        return provider.call("one", lease, demand, want=2, budget=budget)[0]

    for number in (1, 2):
        answer = call(2, number, waiting=1)
        assert answer is not None
        assert answer.labels[0] == "a"
    before = {key: client.dump(key) for key in lease_keys(rated=True)}
    for late in ((2, 1), (2, 2), (1, 3)):
        assert call(*late, waiting=5) is None
    assert {key: client.dump(key) for key in lease_keys(rated=True)} == before


def test_processes_of_an_account_are_served_in_rotation(client: Any) -> None:
    provider = Provider(client, limit=1)
    holder, one, two = processes(provider, "holder", "one", "two")
    holder.call({"x": (1, 1)}, waiting=1)
    one.call({"a": (1, 50)}, waiting=50)
    two.call({"a": (1, 1)}, waiting=1)
    holder.call(give_back=1)
    assert one.call(waiting=49, give_back=0) == ["a"]
    one.call(waiting=49, give_back=1)
    assert two.call(waiting=0) == ["a"]


steps = st.lists(
    st.tuples(st.sampled_from(["ana", "ben", "cid", "zoe"]), st.integers(1, 4)) | st.none(), min_size=1, max_size=60
)
WEIGHTS = {"ana": 1.0, "ben": 3.0, "cid": 0.5, "zoe": 10.0}


@ON_VALKEY
@settings(max_examples=60)
@given(steps=steps)
def test_the_order_is_that_of_the_fair_queue(client: Any, steps: list[tuple[str, int] | None]) -> None:
    """A single permit always goes to the account that FairQueue chooses."""
    client.flushall()
    provider = Provider(client, limit=1)
    (one,) = processes(provider, "one")
    queue: FairQueue[int] = FairQueue()
    counts = dict.fromkeys(WEIGHTS, 0)
    account_of: dict[int, str] = {}
    ids = itertools.count()
    one.call({"x": (1, 1)}, waiting=1)
    holder = "x"
    for step in [*steps, *[None] * 240]:
        if step is not None:
            account, more = step
            for _ in range(min(more, 60 - counts[account])):
                n = next(ids)
                account_of[n] = account
                queue.push(n, account, "app", WEIGHTS[account])
                counts[account] += 1
            assert one.call({account: (WEIGHTS[account], counts[account])}, waiting=len(queue)) == []
            continue
        item = queue.pop()
        if item is None:
            continue
        returned = {holder: (WEIGHTS.get(holder, 1), counts.get(holder, 0), 0)}
        holder = account_of[item]
        assert one.call(returned, waiting=len(queue) + 1, give_back=1) == [holder]
        counts[holder] -= 1
    assert not len(queue)
    assert provider.waiting() == {}


def test_an_account_that_holds_its_share_comes_after_the_others(provider: Provider) -> None:
    """This holds however low its counter is."""
    (one,) = processes(provider, "one")
    assert one.call({"x": (1, 4), "hog": (1, 0)}, waiting=4) == ["x"] * 4
    used, waiting = Counter(x=4), Counter(hog=9, late=9)
    one.call({"x": (1, 0, 4), "hog": (1, 9), "late": (1, 9)}, waiting=18)
    held = []
    for account in ("x", "x", "x", "x", "late", "late", "late"):
        used[account] -= 1
        demand = {name: (1, waiting[name], used[name]) for name in ("x", "hog", "late")}
        (granted,) = one.call(demand, waiting=waiting.total(), give_back=1)
        used[granted] += 1
        waiting[granted] -= 1
        held.append((used["hog"], used["late"]))
    assert held == [(1, 0), (1, 1), (2, 1), (2, 2), (2, 2), (2, 2), (2, 2)]
