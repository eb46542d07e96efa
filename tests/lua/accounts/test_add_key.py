"""An API key is added while the account has fewer keys than its limit."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.redis.client import Script
from tests.lua.scripts import TAG

Add = Callable[..., int]
KEYS, SCOPED = f"{TAG}:keys:acc", f"{TAG}:scoped-keys:acc"


@pytest.fixture
def add(client: Any) -> Add:
    script = client.register_script(Script("accounts/add_key").source)
    return lambda key, record="{}", limit=3: script([KEYS, SCOPED], [key, record, limit])


def test_added_below_the_limit(client: Any, add: Add) -> None:
    assert [add(f"key_{n}", f'{{"n":{n}}}') for n in range(5)] == [1, 1, 1, 0, 0]
    assert client.hgetall(KEYS) == {b"key_0": b'{"n":0}', b"key_1": b'{"n":1}', b"key_2": b'{"n":2}'}
    assert add("key_3", limit=4) == 1
    assert add("key_4", limit=3) == 0, "a lowered limit removes nothing"


def test_keys_of_the_other_kind_count(client: Any, add: Add) -> None:
    client.hset(SCOPED, mapping={"key_8": "{}", "key_9": "{}"})
    assert [add(f"key_{n}") for n in range(2)] == [1, 0]
    assert (client.hkeys(KEYS), client.hlen(SCOPED)) == ([b"key_0"], 2)


def test_adding_again_changes_nothing(client: Any, add: Add) -> None:
    assert add("key_0", "first", limit=1) == 1
    assert add("key_0", "second", limit=1) == 1, "even at the limit"
    assert client.hgetall(KEYS) == {b"key_0": b"first"}
