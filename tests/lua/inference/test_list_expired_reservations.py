"""Which reservations their gateway left behind."""

import pytest

from tests.lua.scripts import Scripts, at

NOON = at("2026-11-21T12:00:00")


@pytest.fixture(autouse=True)
def noon(scripts: Scripts) -> None:
    scripts.set_clock(NOON)


def test_a_lease_is_over_at_its_end_and_not_before(scripts: Scripts) -> None:
    scripts.admit(100, reservation="r", lease=360_000)
    scripts.set_clock(NOON + 360_000_000 - 1)
    assert scripts.overdue() == []
    scripts.set_clock(NOON + 360_000_000)
    assert scripts.overdue() == ["r"]
    # To ask ends nothing.
    assert scripts.spend("2026-11-21") == (0, 100)
    scripts.settle("r", -1)
    assert scripts.overdue() == []


def test_the_longest_overdue_first_and_no_more_than_asked_for(scripts: Scripts) -> None:
    for n, lease in enumerate([5000, 1000, 4000, 2000, 3000]):
        scripts.admit(1, reservation=f"r{n}", lease=lease)
    scripts.set_clock(NOON + 4_000_000)
    assert scripts.overdue(3) == ["r1", "r3", "r4"]
    assert scripts.overdue() == ["r1", "r3", "r4", "r2"]
    for n in range(5):
        scripts.settle(f"r{n}", 0)


def test_faulty_requests_take_no_lease(scripts: Scripts) -> None:
    scripts.admit(0, lease=1)
    scripts.set_clock(NOON + 60_000_000)
    assert scripts.overdue() == []
