"""The command line formats values for people."""

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_gateway.cli.cells import format_age, format_duration, format_euro, format_size, strip_controls

NOW = datetime.datetime(2026, 7, 2, 12, 0, 0, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("then", "text"),
    [
        ("2026-07-02T12:00:30.000Z", "just now"),  # the service's clock is ahead
        ("2026-07-02T11:59:55.000Z", "just now"),
        ("2026-07-02T11:59:18.000Z", "42 s ago"),
        ("2026-07-02T11:57:00.000Z", "3 min ago"),
        ("2026-07-02T09:10:00.000Z", "2 h ago"),
        ("2026-07-01T11:00:00.000Z", "1 day ago"),
        ("2026-06-26T11:00:00.000Z", "6 days ago"),
        ("2026-06-20T12:00:00.000Z", "2026-06-20"),
        ("soon", "soon"),
        (7, "7"),
    ],
)
def test_ago(then: object, text: str) -> None:
    assert format_age(then, NOW) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(0, "0 ms"), (999, "999 ms"), (1000, "1.0 s"), (59_949, "59.9 s"), (59_950, "1 min 0 s"), (125_400, "2 min 5 s")],
)
def test_duration(milliseconds: int, text: str) -> None:
    assert format_duration(milliseconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (102_400, "100 KB"),
        (104_857_600, "100 MB"),
        (2_684_354_560, "2.5 GB"),
        (4_294_967_296, "4 GB"),
    ],
)
def test_size(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("nano", "text"),
    [(0, "0.00"), (50_000_000, "0.05"), (2_000_000_000, "2.00"), (1, "0.000000001"), (1_234_500_000, "1.2345")],
)
def test_euro(nano: int, text: str) -> None:
    assert format_euro(nano) == text


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert strip_controls(text).isprintable() or not {
        c for c in strip_controls(text) if ord(c) < 32 or 127 <= ord(c) < 160
    }
