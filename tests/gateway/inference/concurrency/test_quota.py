"""The process's side of the provider's quota, without the script; test_permits_rate.py tests both."""

import pytest

from gateway.inference.concurrency.lease import BudgetAnswer
from gateway.inference.concurrency.quota import Budget, time_until_free
from gateway.settings import ProviderRate


def test_a_repeated_answer_grants_nothing_more() -> None:
    budget = Budget(ProviderRate(100, 100_000))
    budget.begin(1)
    for requests, tokens in ((4, 10_000), (3, 9_000), (4, 10_000)):
        budget.accept(BudgetAnswer(requests, tokens, 0, 0, 0, []))
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
    call = budget.call(100.0, scarce=False, regular=False, wanted=True, returnable=True)
    assert call.requests.want == 0


@pytest.mark.parametrize(
    ("needed", "seconds"), [(1, 0), (2, 0), (3, 5), (7, 5), (8, 30), (9, 60), (10, 60), (11, 60), (13, 65), (25, 125)]
)
def test_the_time_until_an_amount_is_free(needed: float, seconds: float) -> None:
    """Of ten, two are free, five and one become free after 5 and 30 s, and two are held."""
    assert time_until_free(needed, 10, 2, [(5, 5), (30, 1)], 60) == seconds


def test_without_a_quota_every_amount_is_free() -> None:
    assert time_until_free(1_000, 0, -1, [], 60) == 0
