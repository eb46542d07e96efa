"""Keys of usage, counters and processes.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{pNN}:usage:<account>:<hour>` | hash | `<app>/<model>/<count>` → number, for an hour; about 1,000 fields | 14 days |
| `{pNN}:usage:<account>:<day>` | hash | the same for a UTC day | 400 days |
| `{pNN}:request-log:<account>` | zset | its last 1,000 requests, JSON arrays by arrival, ms | 30 days after the last |
| `{ops}:minute:<minute>` | hash | `requests`, `code:<CODE>`, `ttft:<ms>`, …: `gateway/telemetry/counters.py` | 2 h |
| `{ops}:hour:<hour>` | hash | `requests`, `code:<CODE>` and `settled` of all accounts | 15 days |
| `{ops}:spend:<day>` | zset | accounts by their spend in nano-euro, and `total` | 2 days |
| `{ops}:processes` | set | ids of the gateway processes | 15 s |
| `{ops}:process:<id>` | hash | open `streams`, `startedAt`, `seenAt` | 15 s |
| `{ops}:clock` | hash | the current `day`, `hour` and `minute`, in the format of key names; for Grafana | 60 s |
"""

from __future__ import annotations

from gateway.redis.partitions import partition_tag

PROCESSES_KEY = "{ops}:processes"
CLOCK_KEY = "{ops}:clock"


def usage_key(account_id: str, period: str) -> str:
    """Returns the key of an hour, such as `2026-07-02T12`, or of a day."""
    return f"{partition_tag(account_id)}:usage:{account_id}:{period}"


def requests_key(account_id: str) -> str:
    return f"{partition_tag(account_id)}:request-log:{account_id}"


def usage_keys(account_id: str, hour: str) -> list[str]:
    """Returns the keys of the account's hour, of the day of that hour, and of the account's requests."""
    day = hour.partition("T")[0]
    return [usage_key(account_id, hour), usage_key(account_id, day), requests_key(account_id)]


def minute_key(minute: str) -> str:
    return f"{{ops}}:minute:{minute}"


def hour_key(hour: str) -> str:
    return f"{{ops}}:hour:{hour}"


def spenders_key(day: str) -> str:
    return f"{{ops}}:spend:{day}"


def process_key(process_id: str) -> str:
    return f"{{ops}}:process:{process_id}"
