"""Runs the script that records usage."""

from collections.abc import Mapping, Sequence

from gateway.keys import usage_keys
from gateway.redis.client import Script, Store, flatten

_RECORD_USAGE = Script("telemetry/record_usage")


async def record_usage(
    store: Store,
    account: str,
    hour: str,
    counts: Mapping[str, int],
    by_provider: Mapping[str, int],
    requests: Sequence[tuple[float, str]],
) -> None:
    """Adds `counts` to the account's hour and day, and `requests` (arrival in milliseconds, JSON) to its log.

    `by_provider` are counts of the same requests, for the day.
    """
    entries = [part for arrived, request in requests for part in (f"{arrived:.3f}", request)]
    args = (len(requests), len(by_provider), *entries, *flatten(by_provider), *flatten(counts))
    await store.run_script(_RECORD_USAGE, usage_keys(account, hour), *args)
