"""A record, its companion and their announcement, written in one step."""

from typing import Any

from gateway.redis.client import Script
from tests.lua.scripts import TAG

KEY, COMPANION = f"{TAG}:account:acc", f"{TAG}:invitations:acc"


def test_only_the_expected_record_is_replaced_and_each_change_is_announced(client: Any) -> None:
    script = client.register_script(Script("compare_and_set").source)

    def write(value: str, check: str = "any", expected: str = "") -> int:
        written: int = script([KEY], ["changes", check, expected, value])
        return written

    with client.pubsub() as subscription:
        subscription.subscribe("changes")
        while subscription.get_message(timeout=1)["type"] != "subscribe":
            pass
        client.set(KEY, "old", ex=5)
        assert write('{"é": 1}') == 1
        assert (client.get(KEY).decode(), client.ttl(KEY)) == ('{"é": 1}', -1)
        assert write("") == 1
        assert write("first", "same", "something") == 0
        assert not client.exists(KEY)
        assert write("first", "same", "") == 1
        assert write("other", "same", "") == 0
        assert client.get(KEY) == b"first"
        assert [subscription.get_message(timeout=1)["data"] for _ in range(3)] == [KEY.encode()] * 3
        assert subscription.get_message(timeout=0.1) is None


def test_a_companion_is_written_and_removed_with_the_record(client: Any) -> None:
    """Neither is written if one of them is not the expected one."""
    script = client.register_script(Script("compare_and_set").source)

    def write(expected: str, value: str, companion: str, *before: str) -> int:
        written: int = script([KEY, COMPANION], ["changes", "same", expected, value, companion, 100, *before])
        return written

    assert write("", "one", "invited", "") == 1
    assert 0 < client.ttl(COMPANION) <= 100
    assert [write("other", "two", ""), write("one", "two", "", ""), write("one", "two", "", "other")] == [0, 0, 0]
    assert (client.get(KEY), client.get(COMPANION)) == (b"one", b"invited")
    assert write("one", "two", "", "invited") == 1
    assert (client.get(KEY), client.exists(COMPANION)) == (b"two", 0)
