"""The figures of a snapshot, computed from counts."""

import pytest

from gateway.operations.snapshot import Minute, histogram, quantile, render_counts
from gateway.telemetry.counters import TTFT_BUCKETS_MS, TTFT_FIELDS


def buckets(**counts: int) -> list[int]:
    """By field, `ttft_150=3`."""
    return histogram([{name.replace("_", ":"): str(count) for name, count in counts.items()}])


def test_a_histogram_adds_up_the_minutes() -> None:
    sums = histogram([{"ttft:150": "2", "requests": "9"}, {"ttft:150": "3", "ttft:more": "1"}])
    assert sums[TTFT_FIELDS.index("ttft:150")] == 5
    assert sums[-1] == 1
    assert sum(sums) == 6


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ({}, 0.5, None),
        ({"ttft_10": 1}, 0.5, 5),
        ({"ttft_200": 100}, 0.5, 175),
        ({"ttft_200": 100}, 0.99, 200),
        ({"ttft_100": 50, "ttft_1000": 50}, 0.5, 100),
        ({"ttft_100": 98, "ttft_1000": 2}, 0.99, 875),
        ({"ttft_more": 3}, 0.5, TTFT_BUCKETS_MS[-1]),
    ],
)
def test_a_quantile_lies_in_its_bucket(counts: dict[str, int], q: float, expected: int | None) -> None:
    assert quantile(buckets(**counts), q) == expected


def test_counts_become_a_minute() -> None:
    counts = {"requests": "3", "streams": "2", "code:APP_NOT_FOUND": "1", "ttft:10": "2"}
    assert render_counts("2026-01-01T00:00", counts) == Minute("2026-01-01T00:00:00.000Z", 3, 2, {"APP_NOT_FOUND": 1})
    assert render_counts("2026-01-01T00:01", {}) == Minute("2026-01-01T00:01:00.000Z", 0, 0, {})
