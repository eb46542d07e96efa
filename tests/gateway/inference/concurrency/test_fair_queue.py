"""The order of waiting requests, tested against properties and a model."""

import itertools
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run

from gateway.inference.concurrency.fair_queue import FairQueue, QueueFull
from tests.support.selection import with_more_in_test_all

weights = st.sampled_from([1, 1, 2, 3, 10, 0.5, 0.25])
names = st.sampled_from(["ana", "ben", "cid", "dan"])
Item = tuple[str, str, int]


def fill(accounts: dict[str, float], each: int) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue(account_limit=10_000, limit=1_000_000)
    for account, weight in accounts.items():
        for n in range(each):
            queue.push((account, "app", n), account, "app", weight)
    return queue


@given(st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), weights, min_size=1, max_size=12), st.data())
def test_backlogged_accounts_are_served_by_weight(accounts: dict[str, float], data: st.DataObject) -> None:
    """For any two accounts and any interval, served / weight differs by at most one request of each (VTC's bound)."""
    queue = fill(accounts, 60)
    served: list[str] = []
    # For so many requests, the heaviest account still has some of its 60.
    for _ in range(int(60 * sum(accounts.values()) / max(accounts.values())) - len(accounts)):
        item = queue.pop()
        assert item
        served.append(item[0])
    begin = data.draw(st.integers(0, len(served)))
    counts = Counter(served[begin : data.draw(st.integers(begin, len(served)))])
    for one, other in itertools.combinations(accounts, 2):
        difference = abs(counts[one] / accounts[one] - counts[other] / accounts[other])
        assert difference <= 1 / accounts[one] + 1 / accounts[other] + 1e-6


def test_an_account_that_did_not_wait_has_no_credit() -> None:
    queue = fill({"busy": 1.0}, 1000)
    for _ in range(500):
        queue.pop()
    for n in range(100):
        queue.push(("late", "app", n), "late", "app")
    served = Counter(item[0] for item in (queue.pop() for _ in range(100)) if item)
    assert abs(served["late"] - served["busy"]) <= 1


@given(st.lists(st.sampled_from(["shop", "blog", "forum"]), min_size=1, max_size=60))
def test_apps_are_served_in_rotation_and_each_in_order(apps: list[str]) -> None:
    queue: FairQueue[Item] = FairQueue()
    for n, app in enumerate(apps):
        queue.push(("acc", app, n), "acc", app)
    rounds: dict[str, int] = defaultdict(int)
    last: dict[str, int] = {}
    left = Counter(apps)
    while (item := queue.pop()) is not None:
        _, app, n = item
        assert n > last.get(app, -1)
        last[app] = n
        rounds[app] += 1
        left[app] -= 1
        assert all(rounds[app] <= rounds[other] + 1 for other in left if left[other])


def test_counters_of_past_accounts_are_dropped() -> None:
    queue: FairQueue[Item] = FairQueue()
    queue.push(("busy", "app", -1), "busy", "app")
    for n in range(10_000):
        queue.push(("busy", "app", n), "busy", "app")
        queue.push((f"a{n}", "app", n), f"a{n}", "app")
        queue.pop()
        queue.pop()
    assert len(queue._past) < 200
    assert len(queue._ranks) < 200


class Model(RuleBasedStateMachine):
    """Any order of calls: each pushed item leaves once, and the counts agree with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Item] = FairQueue(account_limit=5, limit=12)
        self.waiting: dict[Item, tuple[str, str]] = {}
        self.weight: dict[str, float] = {}
        self.ids = itertools.count()

    @rule(account=names, app=st.sampled_from(["x", "y"]), weight=weights)
    def push(self, account: str, app: str, weight: float) -> None:
        item = (account, app, next(self.ids))
        own = sum(a == account for a, _ in self.waiting.values())
        if own >= 5 or len(self.waiting) >= 12:
            with pytest.raises(QueueFull):
                self.queue.push(item, account, app, weight)
            return
        self.queue.push(item, account, app, weight)
        self.waiting[item] = (account, app)
        self.weight[account] = weight

    @rule()
    def pop(self) -> None:
        first = self.queue.first()
        item = self.queue.pop()
        assert item == first
        self.take(item)

    @rule(account=names)
    def pop_of(self, account: str) -> None:
        first = self.queue.first_of(account)
        item = self.queue.pop_of(account)
        assert item == first
        if item is None:
            assert all(a != account for a, _ in self.waiting.values())
        else:
            assert item[0] == account
            self.take(item)

    def take(self, item: Item | None) -> None:
        if item is None:
            return
        same = [each for each, where in self.waiting.items() if where == self.waiting[item]]
        assert item == min(same, key=lambda each: each[2])
        del self.waiting[item]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        item = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.remove(item)
        assert not self.queue.remove(item)
        del self.waiting[item]

    @invariant()
    def agrees(self) -> None:
        assert {item: (account, app) for item, account, app in self.queue.items()} == self.waiting
        assert len(self.queue) == len(self.waiting)
        counts = Counter(account for account, _ in self.waiting.values())
        assert set(self.queue.accounts()) == set(counts)
        for account in counts:
            assert self.queue.demand(account) == (self.weight[account], counts[account])

    def teardown(self) -> None:
        while self.waiting:
            item = self.queue.pop()
            assert item is not None
            self.take(item)
        assert self.queue.pop() is None


@with_more_in_test_all("examples", 25, 100)
def test_any_steps_agree_with_the_model(examples: int) -> None:
    run(Model, settings=settings(max_examples=examples))
