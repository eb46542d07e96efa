"""The number of registrations per UTC day is limited."""

from typing import Any

import pytest

from tests.lua.scripts import at, on_test_clock, set_clock

COUNTERS = "{registrations}"


class Registrations:
    def __init__(self, client: Any) -> None:
        self.client = client
        self._register = client.register_script(on_test_clock("accounts/count_registration"))

    def register(self, moment: str, per_day: int = 3) -> tuple[int, int]:
        """Returns 1 below the limit, otherwise 0, and the seconds until midnight."""
        set_clock(self.client, at(moment))
        room, left = self._register([COUNTERS], [per_day])
        return room, left


@pytest.fixture
def registrations(client: Any) -> Registrations:
    return Registrations(client)


def test_no_more_than_the_day_s_limit(registrations: Registrations) -> None:
    noon = "2026-11-21T12:00:00"
    assert [registrations.register(noon)[0] for _ in range(5)] == [1, 1, 1, 0, 0]
    counter = f"{COUNTERS}:2026-11-21"
    assert registrations.client.get(counter) == b"3", "a refused registration does not count"
    assert 86_400 < registrations.client.ttl(counter) <= 2 * 86_400
    assert registrations.register(noon, per_day=4)[0] == 1, "a raised limit applies at once"


def test_the_day_ends_at_midnight_utc(registrations: Registrations) -> None:
    assert registrations.register("2026-12-31T23:59:59.999999", per_day=1) == (1, 1)
    assert registrations.register("2026-12-31T23:59:59.999999", per_day=1) == (0, 1)
    assert registrations.register("2027-01-01T00:00:00", per_day=1) == (1, 86_400)
    assert registrations.register("2027-01-01T12:00:00", per_day=1) == (0, 43_200)


def test_a_limit_of_zero_refuses_all(registrations: Registrations) -> None:
    assert registrations.register("2026-11-21T00:00:00", per_day=0) == (0, 86_400)
    assert not registrations.client.exists(f"{COUNTERS}:2026-11-21")
