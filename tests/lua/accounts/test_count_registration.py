"""The number of registrations per UTC day is limited."""

from typing import Any

from tests.lua.scripts import at, on_test_clock, set_clock

COUNTERS = "{registrations}"


def test_a_days_registrations(client: Any) -> None:
    """A refused one does not count, and a part of the day's number is kept for people who sign in."""
    script = client.register_script(on_test_clock("accounts/count_registration"))

    def register(moment: str, per_day: int, anonymous: int | str = "") -> tuple[str, int]:
        """Returns the verdict, and the seconds until midnight."""
        set_clock(client, at(moment))
        verdict, left = script([COUNTERS], [per_day, anonymous])
        return verdict.decode(), left

    def verdicts(times: int, per_day: int, anonymous: int | str = "") -> list[str]:
        return [register("2026-11-21T12:00:00", per_day, anonymous)[0] for _ in range(times)]

    assert verdicts(1, 0) == ["full"]
    assert verdicts(1, 1, 0) == ["anonymous full"]
    assert not [*client.scan_iter(f"{COUNTERS}*")]
    assert verdicts(4, 5, 2) == ["counted"] * 2 + ["anonymous full"] * 2
    assert verdicts(4, 5) == ["counted"] * 3 + ["full"]
    assert verdicts(1, 5, 3) == ["full"]
    assert verdicts(2, 6, 3) == ["counted", "full"], "a raised limit applies at once"
    for suffix, count in (("", b"6"), (":anonymous", b"3")):
        counter = f"{COUNTERS}:2026-11-21{suffix}"
        assert client.get(counter) == count
        assert 86_400 < client.ttl(counter) <= 2 * 86_400
    assert register("2026-12-31T23:59:59.999999", 1) == ("counted", 1)
    assert register("2026-12-31T23:59:59.999999", 1) == ("full", 1)
    assert register("2027-01-01T00:00:00", 1) == ("counted", 86_400)
    assert register("2027-01-01T12:00:00", 1) == ("full", 43_200)
