"""An account's hour, day and requests, written in one step, each with its expiry."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.lua.scripts import source

KEYS = [
    "{p38}:usage:acc:2026-07-02T12",
    "{p38}:usage:acc:2026-07-02",
    "{p38}:usage-by-provider:acc:2026-07-02",
    "{p38}:request-log:acc",
]
HOUR, DAY, PROVIDERS, REQUESTS = KEYS
Record = Callable[..., int]


@pytest.fixture
def record(client: Any) -> Record:
    script = client.register_script(source("telemetry/record_usage", FIELDS=4, REQUESTS=3))

    def record(*arrivals: float, **counts: int) -> int:
        names = [part for name, count in counts.items() for part in (name.replace("_", "/"), count)]
        entries = [part for arrival in arrivals for part in (arrival, f'["{arrival}"]')]
        by_provider = [part for n in range(6) for part in (f"paris-{n}/m/requests", 1)]
        return script(KEYS, [len(arrivals), 6, *entries, *by_provider, *names])

    return record


def test_an_hour_also_counts_in_its_day(client: Any, record: Record) -> None:
    client.hset(DAY, "notes/m/requests", 5)
    assert record(notes_m_requests=2, notes_m_nanoEuro=2_500_000_000_000_000) == 2
    assert client.hgetall(HOUR) == {b"notes/m/requests": b"2", b"notes/m/nanoEuro": b"2500000000000000"}
    assert client.hget(DAY, "notes/m/requests") == b"7"
    assert 14 * 86_400 - 5 < client.ttl(HOUR) <= 14 * 86_400
    assert 400 * 86_400 - 5 < client.ttl(DAY) <= 400 * 86_400
    assert not client.exists(REQUESTS)


def test_beyond_the_limit_further_apps_are_counted_together(client: Any, record: Record) -> None:
    record(a_m_requests=1, b_m_requests=1, c_m_requests=1)
    for _ in range(2):
        record(a_m_requests=1, e_m_requests=1, f_m_requests=1, g_n_requests=1)
    expected = {"a/m": 3, "b/m": 1, "c/m": 1, "e/m": 2, "*/m": 2, "*/n": 2}
    assert client.hlen(PROVIDERS) == 6, "of each provider, because they are few"
    for key in (HOUR, DAY):
        assert client.hgetall(key) == {f"{name}/requests".encode(): b"%d" % n for name, n in expected.items()}


def test_the_latest_requests_are_kept_whatever_the_order_of_the_writes(client: Any, record: Record) -> None:
    record(1793599200000.25, 1793599200003.5, notes_m_requests=2)
    record(1793599200000.125, 1793599200002, notes_m_requests=2)
    ids = [b'["1793599200000.25"]', b'["1793599200002"]', b'["1793599200003.5"]']
    assert client.zrange(REQUESTS, 0, -1) == ids
    assert 0 < client.ttl(REQUESTS) <= 30 * 86_400
    assert client.hget(HOUR, "notes/m/requests") == b"4"
