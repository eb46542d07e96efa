"""Adding to a counter: all of a key in one step, with its end."""

from typing import Any

import pytest

from gateway.redis.client import Script


@pytest.fixture
def count(client: Any) -> Any:
    return client.register_script(Script("increment").source)


def test_counts_are_added_and_end(client: Any, count: Any) -> None:
    assert count(["{ops}:minute:m"], ["hash", 7200, "requests", 2, "code:X", 1]) == 2
    assert count(["{ops}:minute:m"], ["hash", 7200, "requests", 40]) == 1
    assert client.hgetall("{ops}:minute:m") == {b"requests": b"42", b"code:X": b"1"}
    assert 0 < client.ttl("{ops}:minute:m") <= 7200


def test_members_of_a_ranking_are_added(client: Any, count: Any) -> None:
    large = 2_500_000_000_000_000  # nano-euro: 2.5 million EUR
    count(["{ops}:spend:d"], ["zset", 60, "acc_b", 5, "acc_a", large])
    count(["{ops}:spend:d"], ["zset", 60, "acc_b", 2])
    assert client.zrange("{ops}:spend:d", 0, -1, withscores=True) == [(b"acc_b", 7.0), (b"acc_a", float(large))]
    assert 0 < client.ttl("{ops}:spend:d") <= 60


def test_it_adds_all_of_a_key_or_nothing(client: Any, count: Any) -> None:
    client.set("{ops}:minute:m", "another kind", ex=60)
    with pytest.raises(Exception, match="WRONGTYPE"):
        count(["{ops}:minute:m"], ["hash", 7200, "requests", 1])
    assert client.ttl("{ops}:minute:m") <= 60
