"""The number of registrations per UTC day is limited."""

from typing import Any

import pytest

from tests.lua.scripts import at, on_test_clock, set_clock

COUNTERS = "{registrations}"
NOON = "2026-11-21T12:00:00"
COUNTER = f"{COUNTERS}:2026-11-21"


class Registrations:
    def __init__(self, client: Any) -> None:
        self.client = client
        self._register = client.register_script(on_test_clock("accounts/count_registration"))

    def register(self, moment: str, per_day: int = 3, anonymous: int | str = "") -> tuple[str, int]:
        """Returns the verdict, and the seconds until midnight."""
        set_clock(self.client, at(moment))
        verdict, left = self._register([COUNTERS], [per_day, anonymous])
        return verdict.decode(), left

    def verdicts(self, times: int, per_day: int = 3, anonymous: int | str = "") -> list[str]:
        return [self.register(NOON, per_day, anonymous)[0] for _ in range(times)]


@pytest.fixture
def registrations(client: Any) -> Registrations:
    return Registrations(client)


def test_no_more_than_the_days_limit(registrations: Registrations) -> None:
    assert registrations.verdicts(5) == ["counted"] * 3 + ["full"] * 2
    assert registrations.client.get(COUNTER) == b"3", "a refused registration does not count"
    assert 86_400 < registrations.client.ttl(COUNTER) <= 2 * 86_400
    assert registrations.verdicts(1, per_day=4) == ["counted"], "a raised limit applies at once"


def test_half_is_kept_for_people_who_sign_in(registrations: Registrations) -> None:
    assert registrations.verdicts(4, 5, 2) == ["counted"] * 2 + ["anonymous full"] * 2
    assert registrations.client.get(f"{COUNTER}:anonymous") == b"2"
    assert 86_400 < registrations.client.ttl(f"{COUNTER}:anonymous") <= 2 * 86_400
    assert registrations.verdicts(4, 5) == ["counted"] * 3 + ["full"]
    assert registrations.verdicts(1, 5, 2) == ["full"]


def test_people_who_sign_in_may_use_all_that_is_left(registrations: Registrations) -> None:
    assert registrations.verdicts(4, 5) == ["counted"] * 4
    assert registrations.verdicts(2, 5, 2) == ["counted", "full"]
    assert registrations.client.get(f"{COUNTER}:anonymous") == b"1"


def test_none_may_register_without_a_sign_in(registrations: Registrations) -> None:
    assert registrations.verdicts(1, 1, 0) == ["anonymous full"]
    assert not registrations.client.exists(COUNTER)


def test_the_day_ends_at_midnight_utc(registrations: Registrations) -> None:
    assert registrations.register("2026-12-31T23:59:59.999999", per_day=1) == ("counted", 1)
    assert registrations.register("2026-12-31T23:59:59.999999", per_day=1) == ("full", 1)
    assert registrations.register("2027-01-01T00:00:00", per_day=1) == ("counted", 86_400)
    assert registrations.register("2027-01-01T12:00:00", per_day=1) == ("full", 43_200)


def test_a_limit_of_zero_refuses_all(registrations: Registrations) -> None:
    assert registrations.register(NOON, per_day=0) == ("full", 43_200)
    assert not registrations.client.exists(COUNTER)
