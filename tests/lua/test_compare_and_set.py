"""A record and the message about it, in one step."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.redis.client import Script
from tests.lua.scripts import TAG

Change = Callable[..., int]
KEY = f"{TAG}:account:acc"


@pytest.fixture
def change(client: Any) -> Change:
    script = client.register_script(Script("compare_and_set").source)
    return lambda value, check="any", expected="": script([KEY], ["changes", check, expected, value])


@pytest.fixture
def told(client: Any) -> Any:
    """What was announced since the last question."""
    with client.pubsub() as subscription:
        subscription.subscribe("changes")
        while subscription.get_message(timeout=1)["type"] != "subscribe":
            pass

        def told() -> list[bytes]:
            messages = []
            while message := subscription.get_message(timeout=0.1):
                messages.append(message["data"])
            return messages

        yield told


def test_written_and_told(client: Any, change: Change, told: Any) -> None:
    assert change('{"é": 1}') == 1
    assert client.get(KEY).decode() == '{"é": 1}'
    assert told() == [KEY.encode()]


def test_removed_and_told(client: Any, change: Change, told: Any) -> None:
    change("old")
    assert change("") == 1
    assert not client.exists(KEY)
    assert told() == [KEY.encode()] * 2


def test_only_over_the_expected_record(client: Any, change: Change, told: Any) -> None:
    assert change("first", "same", "something") == 0
    assert not client.exists(KEY)
    assert change("first", "same", "") == 1
    assert change("other", "same", "") == 0
    assert change("second", "same", "first") == 1
    assert change("third", "same", "first") == 0
    assert client.get(KEY) == b"second"
    assert told() == [KEY.encode()] * 2


def test_what_goes_with_a_record(client: Any) -> None:
    """It is written and removed with the record, and not when the record is another than expected."""
    script, beside = client.register_script(Script("compare_and_set").source), f"{TAG}:previous-secret:acc"
    assert script([KEY, beside], ["changes", "same", "", "new", "old", 100]) == 1
    assert client.get(beside) == b"old"
    assert 0 < client.ttl(beside) <= 100
    assert script([KEY, beside], ["changes", "same", "other", "newer", "", 100]) == 0
    assert client.get(beside) == b"old"
    assert script([KEY, beside], ["changes", "same", "new", "newer", "", 100]) == 1
    assert (client.get(KEY), client.exists(beside)) == (b"newer", 0)


def test_an_end_goes_with_the_old_record(client: Any, change: Change) -> None:
    """A record written over one that expired some day must not inherit its end."""
    client.set(KEY, "old", ex=5)
    change("new")
    assert client.ttl(KEY) == -1
