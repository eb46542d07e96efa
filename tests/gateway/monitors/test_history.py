"""How an outage is split into days, and when it counts."""

from gateway.monitors.health import AppHealth
from gateway.monitors.history import DAY, DAYS, changes, outage

MIDNIGHT = 1_783_036_800_000  # 2026-07-03T00:00:00Z


def test_an_outage_over_midnight_counts_on_both_days() -> None:
    counted = outage(MIDNIGHT - 5_000, MIDNIGHT + 7_000)
    assert counted == {
        "2026-07-02:down": 5_000,
        "2026-07-02:outages": 1,
        "2026-07-03:down": 7_000,
        "2026-07-03:outages": 1,
    }
    assert outage(MIDNIGHT, MIDNIGHT) == {}
    assert outage(MIDNIGHT, MIDNIGHT + DAY) == {"2026-07-03:down": DAY, "2026-07-03:outages": 1}


def test_an_endless_outage_is_bounded() -> None:
    counted = outage(0, MIDNIGHT)
    assert len(counted) == 2 * DAYS
    assert sum(value for name, value in counted.items() if name.endswith(":down")) == DAYS * DAY


def test_it_counts_when_it_ends() -> None:
    down, up = AppHealth(status="unhealthy", since=MIDNIGHT), AppHealth(status="healthy", since=MIDNIGHT + 60_000)
    assert changes(down, down, MIDNIGHT + 30_000) == {}
    assert changes(up, up, MIDNIGHT + 90_000) == {}
    assert changes(AppHealth(failures=2), up, MIDNIGHT + 90_000) == {}
    assert changes(down, up, MIDNIGHT + 60_000) == {"2026-07-03:down": 60_000, "2026-07-03:outages": 1}
