"""A record and its announcement, written in one step."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.redis.client import Script
from tests.lua.scripts import TAG

Write = Callable[..., int]
KEY = f"{TAG}:account:acc"


@pytest.fixture
def write(client: Any) -> Write:
    script = client.register_script(Script("compare_and_set").source)
    return lambda value, check="any", expected="": script([KEY], ["changes", check, expected, value])


@pytest.fixture
def announced(client: Any) -> Any:
    """Yields a function that returns the announcements since its last call."""
    with client.pubsub() as subscription:
        subscription.subscribe("changes")
        while subscription.get_message(timeout=1)["type"] != "subscribe":
            pass

        def announced() -> list[bytes]:
            messages = []
            while message := subscription.get_message(timeout=0.1):
                messages.append(message["data"])
            return messages

        yield announced


def test_only_the_expected_record_is_replaced_and_each_change_is_announced(
    client: Any, write: Write, announced: Any
) -> None:
    client.set(KEY, "old", ex=5)
    assert write('{"é": 1}') == 1
    assert (client.get(KEY).decode(), client.ttl(KEY)) == ('{"é": 1}', -1)
    assert write("") == 1
    assert write("first", "same", "something") == 0
    assert not client.exists(KEY)
    assert write("first", "same", "") == 1
    assert write("other", "same", "") == 0
    assert write("second", "same", "first") == 1
    assert write("third", "same", "first") == 0
    assert client.get(KEY) == b"second"
    assert announced() == [KEY.encode()] * 4


def test_a_second_key_is_written_and_removed_with_the_record(client: Any) -> None:
    """It stays unchanged if the record is not the expected one."""
    script, companion = client.register_script(Script("compare_and_set").source), f"{TAG}:previous-secret:acc"
    assert script([KEY, companion], ["changes", "same", "", "new", "old", 100]) == 1
    assert client.get(companion) == b"old"
    assert 0 < client.ttl(companion) <= 100
    assert script([KEY, companion], ["changes", "same", "other", "newer", "", 100]) == 0
    assert client.get(companion) == b"old"
    assert script([KEY, companion], ["changes", "same", "new", "newer", "", 100]) == 1
    assert (client.get(KEY), client.exists(companion)) == (b"newer", 0)


def test_a_second_key_that_another_process_has_changed(client: Any, announced: Any) -> None:
    """Neither of the two is written then, even if the record itself is the expected one."""
    script, companion = client.register_script(Script("compare_and_set").source), f"{TAG}:invitations:acc"
    assert script([KEY, companion], ["changes", "same", "", "one", "invited", 100, ""]) == 1
    for expected in ("", "other"):
        assert script([KEY, companion], ["changes", "same", "one", "two", "", 100, expected]) == 0
    assert (client.get(KEY), client.get(companion)) == (b"one", b"invited")
    assert script([KEY, companion], ["changes", "same", "one", "two", "", 100, "invited"]) == 1
    assert (client.get(KEY), client.exists(companion)) == (b"two", 0)
    assert announced() == [KEY.encode()] * 2
