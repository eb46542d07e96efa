"""settle.lua ends each reservation once."""

from typing import Any

import pytest

from gateway.inference.spend.reservations import ReservationRecord
from tests.lua.scripts import TAG, Scripts, at

DAY = "2026-11-21"


@pytest.fixture(autouse=True)
def noon(scripts: Scripts) -> None:
    scripts.set_clock(at(f"{DAY}T12:00:00"))


@pytest.mark.parametrize("lost", ["nothing", "the spend", "all"])
def test_a_day_is_kept_for_five_weeks_and_a_users_for_two_days(client: Any, scripts: Scripts, lost: str) -> None:
    """This also holds if the settlement restores money that a failover lost."""
    keys = (f"{TAG}:spend:acc:{DAY}", f"{TAG}:spend-by-user:acc:app:ana:{DAY}")
    reply = scripts.admit(100, reservation="r", user_cap=1000)
    assert [client.ttl(key) // 86_400 for key in keys] in ([34, 1], [35, 2])
    if lost != "nothing":
        client.delete(*keys)
    if lost == "all":
        client.delete(f"{TAG}:reservations", f"{TAG}:leases")
    record = ReservationRecord("acc", DAY, 100, reply.now + 360_000, "app", "ana")
    assert scripts.end("r", 1, record)[0] == ("recovered" if lost == "all" else "settled")
    assert [client.ttl(key) // 86_400 for key in keys] in ([34, 1], [35, 2])


NOON = at(f"{DAY}T12:00:00") // 1000
RECORD = ReservationRecord("acc", DAY, 100, NOON + 360_000, "app")
GRACE = 600_000


@pytest.mark.parametrize(("cost", "booked"), [(0, 0), (100, 100), (101, 100), (-1, 100)])
def test_a_lost_reservation_is_booked_from_its_record(scripts: Scripts, cost: int, booked: int) -> None:
    """At most at its maximum."""
    assert scripts.end("r", cost, RECORD) == ("recovered", booked)
    assert scripts.end("r", cost, RECORD) == ("ended", 0)
    assert scripts.spend(DAY) == (booked, 0)


@pytest.mark.parametrize("late", [None, 0, 3_600_000])
def test_a_tombstone_outlives_the_time_in_which_a_record_counts(
    client: Any, scripts: Scripts, late: int | None
) -> None:
    """Whether a gateway has settled the reservation or, some time after it had expired, a monitors worker."""
    scripts.admit(100, reservation="r")
    scripts.set_clock((NOON if late is None else RECORD.expires + late) * 1000)
    assert scripts.end("r", 40, RECORD if late is None else None) == ("settled", 40)
    counts = RECORD.expires - NOON + GRACE if late is None else max(GRACE - late, 0)
    assert counts < client.pttl(f"{TAG}:settled:r") <= counts + 60_000
    assert scripts.end("r", 40, RECORD) == ("ended", 0)
    client.delete(f"{TAG}:settled:r")  # as Redis does at that time
    for early, outcome in ((0, ("unknown", 0)), (1, ("recovered", 40))):
        scripts.set_clock((RECORD.expires + GRACE) * 1000 - early)
        assert scripts.end("r", 40, RECORD) == outcome
