"""The figures of a snapshot, computed from counts."""

import pytest

from gateway.operations.snapshot import histogram, quantile
from gateway.telemetry.counters import TTFT_BUCKETS_MS


def buckets(**counts: int) -> list[int]:
    """By field, `ttft_150=3`."""
    return histogram([{name.replace("_", ":"): str(count) for name, count in counts.items()}])


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
