"""The process's side of the provider's quota, without the script; tests/lua/inference/test_quota.py tests both."""

import pytest

from gateway.inference.concurrency.lease import BudgetAnswer, BudgetCall
from gateway.inference.concurrency.quota import Budget, time_until_free
from gateway.settings import ProviderRate


@pytest.fixture
def budget() -> Budget:
    """Returns a budget of four requests and 10,000 tokens."""
    budget = Budget(ProviderRate(100, 100_000))
    budget.begin(1)
    budget.accept(BudgetAnswer(4, 10_000, 0, 0, 0, []))
    return budget


def call(budget: Budget, *, scarce: bool = False, returnable: bool = True) -> BudgetCall:
    return budget.call(100.0, scarce=scarce, regular=False, wanted=True, returnable=returnable)


def numbers(budget: Budget) -> tuple[tuple[int, int, int], ...]:
    report = call(budget, returnable=False)
    return tuple((each.granted, each.returned, each.spent) for each in (report.requests, report.tokens))


def test_more_than_was_reserved_is_never_spent(budget: Budget) -> None:
    budget.take(6_000, 99.0)
    budget.spend_tokens(1, 6_000, 10**9)
    assert budget.tokens.spare == 4_000


def test_amounts_of_an_earlier_lease_are_not_counted_again(budget: Budget) -> None:
    budget.take(6_000, 99.0)
    budget.begin(2)
    assert not budget.fits(1)
    budget.spend_request(1)
    budget.spend_tokens(1, 6_000, 500)
    assert numbers(budget) == ((0, 0, 0), (0, 0, 0))


def test_a_repeated_answer_grants_nothing_more(budget: Budget) -> None:
    budget.accept(BudgetAnswer(3, 9_000, 0, 0, 0, []))
    budget.accept(BudgetAnswer(4, 10_000, 0, 0, 0, []))
    assert (budget.requests.spare, budget.tokens.spare) == (4, 10_000)


def test_requests_always_fit_without_a_quota_of_requests() -> None:
    budget = Budget(ProviderRate(requests=0, tokens=500))
    budget.begin(1)
    budget.accept(BudgetAnswer(0, 500, -1, 0, 0, []))
    assert budget.is_possible(500)
    assert not budget.is_possible(501)
    for _ in range(5):
        assert budget.fits(100)
        budget.take(100, 99.0)
        budget.spend_request(1)
    assert not budget.fits(1)
    assert call(budget).requests.want == 0


@pytest.mark.parametrize(
    ("needed", "seconds"), [(1, 0), (2, 0), (3, 5), (7, 5), (8, 30), (9, 60), (10, 60), (11, 60), (13, 65), (25, 125)]
)
def test_the_time_until_an_amount_is_free(needed: float, seconds: float) -> None:
    """Of ten, two are free, five and one become free after 5 and 30 s, and two are held."""
    assert time_until_free(needed, 10, 2, [(5, 5), (30, 1)], 60) == seconds


def test_without_a_quota_every_amount_is_free() -> None:
    assert time_until_free(1_000, 0, -1, [], 60) == 0
