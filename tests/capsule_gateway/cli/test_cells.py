"""The command line formats values for people."""

import datetime
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_gateway.cli.cells import format_age, format_duration, format_euro, format_size, strip_controls

NOW = datetime.datetime(2026, 7, 2, 12, 0, 0, tzinfo=datetime.UTC)
AGES: dict[object, str] = {
    "2026-07-02T12:00:30.000Z": "just now",  # the service's clock is ahead
    "2026-07-02T11:59:55.000Z": "just now",
    "2026-07-02T11:59:18.000Z": "42 s ago",
    "2026-07-02T11:57:00.000Z": "3 min ago",
    "2026-07-02T09:10:00.000Z": "2 h ago",
    "2026-07-01T11:00:00.000Z": "1 day ago",
    "2026-06-26T11:00:00.000Z": "6 days ago",
    "2026-06-20T12:00:00.000Z": "2026-06-20",
    "soon": "soon",
    7: "7",
}
DURATIONS = {0: "0 ms", 999: "999 ms", 1000: "1.0 s", 59_949: "59.9 s", 59_950: "1 min 0 s", 125_400: "2 min 5 s"}
SIZES = {0: "0 bytes", 1: "1 byte", 1023: "1023 bytes", 102_400: "100 KB", 100 << 20: "100 MB", 5 << 29: "2.5 GB"}
EUROS = {0: "0.00", 50_000_000: "0.05", 2_000_000_000: "2.00", 1: "0.000000001", 1_234_500_000: "1.2345"}


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (lambda then: format_age(then, NOW), AGES),
        (format_duration, DURATIONS),
        (format_size, SIZES),
        (format_euro, EUROS),
    ],
    ids=["age", "duration", "size", "euro"],
)
def test_what_people_read(form: Callable[[object], str], texts: dict[object, str]) -> None:
    assert {value: form(value) for value in texts} == texts


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert strip_controls(text).isprintable() or not {
        c for c in strip_controls(text) if ord(c) < 32 or 127 <= ord(c) < 160
    }
