"""The provider's quota of any minute in lease.lua: each rule, and random interleavings."""

import random
from collections import deque
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.inference.concurrency.lease import BudgetAnswer, BudgetCall, LeaseAnswer, LeaseCall, PermitLease
from gateway.inference.concurrency.quota import Budget
from gateway.settings import ProviderRate
from tests.lua.leases import LEASE, Demand, Provider
from tests.lua.scripts import ON_VALKEY

pytestmark = ON_VALKEY

WINDOW = 60.0


class Rated:
    """One process that behaves like `Permits`, with every request that it starts."""

    def __init__(self, provider: Provider, name: str, rate: ProviderRate, started: list["Request"]) -> None:
        self.provider, self.name = provider, name
        self.lease, self.budget = PermitLease(LEASE), Budget(rate, WINDOW)
        self.waiting: dict[str, deque[int]] = {}  # account -> tokens of its requests
        self.running: list[Request] = []
        self.started = started
        self.answer: LeaseAnswer  # of the last call
        self.scarce = False

    def send(self, *, spares: int = 0, leave: bool = False) -> tuple[LeaseCall, LeaseAnswer | None]:
        lease, budget = self.lease, self.budget
        waiting = sum(map(len, self.waiting.values()))
        call = lease.call(self.provider.now, lease.spare if self.scarce or leave else 0, waiting)
        budget.begin(lease.epoch)
        budget_call = self.budget_call(spares, wanted=not waiting, scarce=self.scarce or leave)
        demand: Demand = {a: (1, len(each), 0, each[0] if each else 0) for a, each in self.waiting.items()}
        answer, _ = self.provider.call(self.name, call, demand, want=spares, leave=leave, budget=budget_call)
        return call, answer

    def budget_call(self, spares: int, *, wanted: bool = True, scarce: bool = False) -> BudgetCall:
        call = self.budget.call(self.provider.now, scarce=scarce, regular=False, wanted=wanted, returnable=True)
        want = [max(0, min(each.want, spares * (1, 4_096)[n])) for n, each in enumerate((call.requests, call.tokens))]
        requests, tokens = (replace(each, want=n) for each, n in zip((call.requests, call.tokens), want, strict=True))
        return replace(call, requests=requests, tokens=tokens)

    def receive(self, call: LeaseCall, answer: LeaseAnswer | None) -> None:
        if answer is None or not self.lease.renew(call, self.provider.now):
            return
        self.answer, self.scarce = answer, answer.scarce
        assert answer.budget is not None
        self.budget.accept(answer.budget)
        for account in self.lease.accept(call.epoch, answer.before, answer.labels, self.provider.now) or []:
            queue = self.waiting.get(account)
            if queue and self.take(queue[0]):
                queue.popleft()

    def call(self, **options: Any) -> BudgetAnswer:
        self.receive(*self.send(**options))
        assert self.answer.budget is not None
        return self.answer.budget

    def enqueue(self, account: str, tokens: int = 0, count: int = 1) -> None:
        self.waiting.setdefault(account, deque()).extend([tokens] * count)

    def take(self, tokens: int = 0) -> bool:
        """Starts a request with a spare permit and budget."""
        now = self.provider.now
        if not self.budget.fits(tokens) or not self.lease.take(now):
            return False
        self.budget.take(tokens, now)
        self.budget.spend_request(self.budget.epoch)
        request = Request(now, tokens, self.budget.epoch)
        self.running.append(request)
        self.started.append(request)
        return True

    def end(self, used: int = 0) -> None:
        request = self.running.pop(0)
        request.used = min(used, request.tokens)
        request.ended = self.provider.now
        self.lease.release()
        self.budget.spend_tokens(request.epoch, request.tokens, used)


class Request:
    def __init__(self, at: float, tokens: int, epoch: int) -> None:
        self.at, self.tokens, self.epoch = at, tokens, epoch
        self.used: int | None = None
        self.ended = at


def most(started: list[Request], now: float) -> tuple[int, int]:
    """Returns the requests that started within the last window, and their tokens."""
    recent = [each for each in started if each.at > now - WINDOW]
    return len(recent), sum(each.tokens if each.used is None else each.used for each in recent)


@pytest.fixture
def provider(client: Any) -> Provider:
    return Provider(client, limit=1000)


def processes(provider: Provider, count: int, requests: int = 0, tokens: int = 0) -> list[Rated]:
    started: list[Request] = []
    return [Rated(provider, f"p{n}", ProviderRate(requests, tokens), started) for n in range(count)]


def advance(provider: Provider, seconds: float) -> None:
    provider.set_clock(provider.now + seconds)


def test_the_last_request_of_a_small_quota_is_never_spare(provider: Provider) -> None:
    one, two = processes(provider, 2, requests=1)
    one.call(spares=4)
    assert one.budget.requests.spare == 0
    two.enqueue("a")
    two.call()
    assert len(two.started) == 1


def test_a_request_that_needs_many_tokens_stays_first(provider: Provider) -> None:
    one, two = processes(provider, 2, tokens=10_000)
    one.enqueue("small", 2_000, count=4)
    one.call()
    two.enqueue("large", 9_000)
    two.call()
    one.enqueue("small", 2_000, count=9)
    one.call()
    assert (len(one.running), len(two.running)) == (4, 0)
    for _ in range(4):
        one.end(used=0)
    one.call()
    two.call()
    assert (len(one.running), len(two.running)) == (0, 1)


def test_nothing_is_spare_while_a_request_waits(provider: Provider) -> None:
    one, two = processes(provider, 2, tokens=10_000)
    one.enqueue("small", 2_000)
    one.call()
    two.enqueue("large", 9_000)
    two.call()
    one.call(spares=4)
    assert (one.budget.tokens.spare, two.running) == (0, [])
    one.end(used=0)
    one.call()
    two.call()
    assert len(two.running) == 1


def test_the_budget_of_a_dead_process_counts_as_spent_for_a_minute(provider: Provider) -> None:
    dead, other = processes(provider, 2, requests=4)
    dead.enqueue("a", count=2)
    dead.call(spares=2)
    dead.call(spares=2)  # one of the two that are left
    died = provider.now
    freed = []
    for _ in range(400):
        advance(provider, 0.25)
        before = len(other.started)
        other.enqueue("b")
        other.call()
        freed += [provider.now - died] * (len(other.started) - before)
    assert dead.budget.requests.spare == 1
    assert [round(at) for at in freed] == [0, 61, 61, 61, 89]


def test_after_data_loss_the_quota_counts_as_spent_if_a_process_started_a_request(provider: Provider) -> None:
    one, two = processes(provider, 2, requests=5)
    one.enqueue("a", count=5)
    one.call()
    clock = provider.now
    provider.client.flushall()
    provider.set_clock(clock + 10)
    two.enqueue("b")
    two.call()  # it has not started a request and does not know of any; the grant is the risk of data loss
    one.enqueue("a", count=5)
    one.call()
    for _ in range(5):
        advance(provider, 12)
        one.call()
    assert len(one.started) - len(two.running) == 5
    advance(provider, 3)
    one.call()
    assert len(one.started) > 6


@pytest.mark.parametrize("seed", [1, 5, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 2, 3, 4))])
def test_any_window_is_within_the_quota(provider: Provider, seed: int) -> None:
    """Processes start and end requests, wait, leave, die, and lose leases and answers, for minutes of one clock."""
    draw = random.Random(seed)
    quota, tokens = draw.choice([(7, 0), (0, 9_000), (30, 40_000), (60, 0)])
    living = processes(provider, 4, quota, tokens)
    started, births = living[0].started, len(living)
    replies: list[tuple[Rated, LeaseCall, LeaseAnswer | None]] = []
    for _ in range(1500):
        one = draw.choice(living)
        match draw.choice(["enqueue", "take", "end", *["call"] * 3, "scarce", "send", "receive", "replace", "advance"]):
            case "enqueue":
                one.enqueue(draw.choice("abc"), draw.randrange(1, 5_000))
            case "take":
                one.take(draw.randrange(1, 5_000))
            case "end" if one.running:
                one.end(draw.randrange(6_000))
            case "call":
                one.call(spares=draw.choice([0, 4]))
            case "scarce":
                one.scarce = True
            case "send":
                replies.append((one, *one.send(spares=4)))
            case "receive" if replies:  # late, or never
                one, call, answer = replies.pop()
                one.receive(call, answer)
                replies.clear()
            case "replace" if draw.random() < 0.2:
                if draw.random() < 0.5:  # otherwise it dies
                    one.send(leave=True)
                living.remove(one)
                births += 1
                living.append(Rated(provider, f"p{births}", one.budget.rate, started))
                replies.clear()
            case "advance":
                advance(provider, draw.choice([0.001, 0.2, 0.9, 1, 1.5, 5, 26.0 if draw.random() < 0.2 else 0.1]))
                if draw.random() < 0.02:
                    advance(provider, 40)  # every lease ends
        requests, used = most(started, provider.now)
        assert not quota or requests <= quota
        assert not tokens or used <= tokens
    assert len(started) > (quota or 10)
