"""The process's side of a lease, without the script; tests/lua/inference/test_lease_machine.py tests both together."""

import pytest

from gateway.inference.concurrency.lease import BudgetAnswer, PermitLease
from gateway.inference.concurrency.lease import LeaseAnswer as Answer
from gateway.inference.concurrency.lease import read_lease_answer as read_answer

LENGTH = 28.0


@pytest.fixture
def lease() -> PermitLease:
    """Returns a lease with four permits, renewed at 100."""
    lease = PermitLease(LENGTH)
    assert lease.renew(lease.call(100.0), 100.1)
    assert lease.accept(1, 0, ["-"] * 4, 100.1) == ["-"] * 4
    return lease


def test_a_lease_is_counted_from_the_moment_before_the_call(lease: PermitLease) -> None:
    call = lease.call(110.0)
    assert lease.renew(call, 120.0)
    assert lease.take(137.9)
    assert not lease.take(138.0)


def test_a_new_epoch_holds_the_permits_in_use(lease: PermitLease) -> None:
    assert lease.take(101.0)
    assert lease.take(101.0)
    late = lease.call(120.0)
    call = lease.call(128.0)
    assert (call.epoch, call.granted, call.returned, call.used) == (2, 2, 0, 2)
    assert call.number > late.number
    assert not lease.renew(late, 128.0)
    lease.release()
    assert not lease.take(128.1)
    assert lease.renew(call, 128.2)
    assert lease.take(128.3)
    assert lease.accept(1, 4, ["acc"], 128.3) == []


def test_answers() -> None:
    assert read_answer(["late"]) is None
    assert read_answer(["ok", 1, 0, 100, 7, 2, 1500, 3, ["acc", "-"], ["acc", 2]]) == Answer(
        True, False, 100, 7, 2, 1.5, 3, ["acc", "-"], {"acc": 2}
    )
    budget = [5, 900, -1, 100, 3, "1000", ["1500 0 70", "2500 0 30"]]
    answer = read_answer(["ok", 1, 1, 100, 7, 2, 0, 0, [], [], budget])
    assert answer is not None
    assert answer.budget == BudgetAnswer(5, 900, -1, 100, 3, [(0.5, 0, 70), (1.5, 0, 30)])
