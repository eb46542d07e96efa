"""Counters of one key, incremented in one step with its expiry."""

from typing import Any

import pytest

from gateway.redis.client import Script


@pytest.fixture
def increment(client: Any) -> Any:
    return client.register_script(Script("increment_counters").source)


def test_counts_are_added_and_expire(client: Any, increment: Any) -> None:
    assert increment(["{ops}:minute:m"], ["hash", 7200, "requests", 2, "code:X", 1]) == 2
    assert increment(["{ops}:minute:m"], ["hash", 7200, "requests", 40]) == 1
    assert client.hgetall("{ops}:minute:m") == {b"requests": b"42", b"code:X": b"1"}
    assert 0 < client.ttl("{ops}:minute:m") <= 7200
    client.set("{ops}:minute:n", "another kind", ex=60)
    with pytest.raises(Exception, match="WRONGTYPE"):
        increment(["{ops}:minute:n"], ["hash", 7200, "requests", 1])
    assert client.ttl("{ops}:minute:n") <= 60, "it stays unchanged"


def test_members_of_a_zset_are_incremented(client: Any, increment: Any) -> None:
    large = 2_500_000_000_000_000  # nano-euro: 2.5 million EUR
    increment(["{ops}:spend:d"], ["zset", 60, "acc_b", 5, "acc_a", large])
    increment(["{ops}:spend:d"], ["zset", 60, "acc_b", 2])
    assert client.zrange("{ops}:spend:d", 0, -1, withscores=True) == [(b"acc_b", 7.0), (b"acc_a", float(large))]
    assert 0 < client.ttl("{ops}:spend:d") <= 60
