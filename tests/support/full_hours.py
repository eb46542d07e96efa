"""Keeps tests away from the end of an hour or a day, where the figures that they read start again."""

import time

HOUR_SECONDS, DAY_SECONDS = 3600, 86_400
MARGIN_SECONDS = 30.0  # more than the tests need that read such figures


def wait_past_end_of(period: int) -> None:
    """Waits for the end of the current hour or day in UTC, if it is near."""
    left = period - time.time() % period
    if left < MARGIN_SECONDS:
        time.sleep(left + 0.1)
