"""list_expired_reservations.lua finds the reservations of gateways that have died."""

import pytest

from tests.lua.scripts import Scripts, at

NOON = at("2026-11-21T12:00:00")


@pytest.fixture(autouse=True)
def noon(scripts: Scripts) -> None:
    scripts.set_clock(NOON)


def test_the_longest_expired_come_first_up_to_the_limit(scripts: Scripts) -> None:
    for n, life in enumerate([5000, 1000, 4000, 2000, 3000]):
        scripts.admit(1, reservation=f"r{n}", life=life)
    scripts.set_clock(NOON + 4_000_000)
    assert scripts.list_expired(3) == ["r1", "r3", "r4"]
    assert scripts.list_expired() == ["r1", "r3", "r4", "r2"]
    for n in range(5):
        scripts.settle(f"r{n}", 0)
