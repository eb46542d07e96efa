"""Counters of one key, incremented in one step with its expiry."""

from typing import Any

import pytest

from gateway.redis.client import Script


def test_counts_are_added_and_expire(client: Any) -> None:
    increment, large = client.register_script(Script("increment_counters").source), 2_500_000_000_000_000  # nano-euro
    assert increment(["{ops}:minute:m"], ["hash", 7200, "requests", 2, "code:X", 1]) == 2
    assert increment(["{ops}:minute:m"], ["hash", 7200, "requests", 40]) == 1
    assert client.hgetall("{ops}:minute:m") == {b"requests": b"42", b"code:X": b"1"}
    increment(["{ops}:spend:d"], ["zset", 60, "acc_b", 5, "acc_a", large])
    increment(["{ops}:spend:d"], ["zset", 60, "acc_b", 2])
    assert client.zrange("{ops}:spend:d", 0, -1, withscores=True) == [(b"acc_b", 7.0), (b"acc_a", float(large))]
    assert [0 < client.ttl(key) <= 7200 for key in ("{ops}:minute:m", "{ops}:spend:d")] == [True, True]
    with pytest.raises(Exception, match="WRONGTYPE"):
        increment(["{ops}:spend:d"], ["hash", 7200, "requests", 1])
    assert client.ttl("{ops}:spend:d") <= 60, "it stays unchanged"
