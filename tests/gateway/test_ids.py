"""The times that people name."""

import math
import time

import pytest

from gateway.ids import ALWAYS, TimeSpan, read_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-07-02", 1_782_950_400),
        ("2026-07-02T12:00", 1_782_993_600),
        ("2026-07-02T12:00:00.5+02:00", 1_782_986_400.5),
    ],
)
def test_times_in_iso_8601_are_in_utc(text: str, seconds: float) -> None:
    assert read_time(text) == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(("text", "ago"), [("0s", 0), ("90s", 90), ("30m", 1_800), ("1h", 3_600), ("2d", 172_800)])
def test_how_long_ago(text: str, ago: int) -> None:
    assert read_time(text) == pytest.approx(time.time() - ago, abs=5)
    assert read_time("999999d") == 0, "nothing is before the epoch"


@pytest.mark.parametrize(
    "text", ["", "h", "1", "1 h", "-1h", "1.5h", "1H", "1w", "1h30m", "1234567h", "yesterday", "٣h"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError):
        read_time(text)


def test_a_span_has_its_beginning_but_not_its_end() -> None:
    assert [at for at in range(5) if TimeSpan(1, 3).contains(at)] == [1, 2]
    assert ALWAYS.contains(-math.inf)
    assert not TimeSpan(since=0).contains(-math.inf)
