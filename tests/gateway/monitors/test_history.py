"""An outage is split into days, and counted when it ends."""

from gateway.monitors.health import AppHealth
from gateway.monitors.history import DAY_MS, DAYS, count_ended_outage, split_outage

MIDNIGHT = 1_783_036_800_000  # 2026-07-03T00:00:00Z


def test_an_outage_over_midnight_counts_on_its_first_day() -> None:
    counted = split_outage(MIDNIGHT - 5_000, MIDNIGHT + 7_000)
    assert counted == {
        "2026-07-02:down": 5_000,
        "2026-07-02:outages": 1,
        "2026-07-03:down": 7_000,
    }
    assert split_outage(MIDNIGHT, MIDNIGHT) == {}
    assert split_outage(MIDNIGHT, MIDNIGHT + DAY_MS) == {"2026-07-03:down": DAY_MS, "2026-07-03:outages": 1}


def test_an_outage_counts_90_days_at_most() -> None:
    counted = split_outage(0, MIDNIGHT - 1)
    down = sorted(name for name in counted if name.endswith(":down"))
    assert (len(down), down[0], down[-1]) == (DAYS, "2026-04-04:down", "2026-07-02:down")
    assert [name for name in counted if name.endswith(":outages")] == ["2026-04-04:outages"]
    assert sum(counted[name] for name in down) == DAYS * DAY_MS - 1


def test_an_outage_is_counted_when_it_ends() -> None:
    down, up = AppHealth(status="unhealthy", since=MIDNIGHT), AppHealth(status="healthy", since=MIDNIGHT + 60_000)
    assert count_ended_outage(down, down, MIDNIGHT + 30_000) == {}
    assert count_ended_outage(up, up, MIDNIGHT + 90_000) == {}
    assert count_ended_outage(AppHealth(failures=2), up, MIDNIGHT + 90_000) == {}
    assert count_ended_outage(down, up, MIDNIGHT + 60_000) == {"2026-07-03:down": 60_000, "2026-07-03:outages": 1}
