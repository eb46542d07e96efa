"""An API key is added while the account has fewer keys than its limit."""

from typing import Any

from gateway.redis.client import Script
from tests.lua.scripts import TAG

KEYS, SCOPED = f"{TAG}:keys:acc", f"{TAG}:scoped-keys:acc"


def test_added_below_the_limit(client: Any) -> None:
    """Keys of the other kind count."""
    script = client.register_script(Script("accounts/add_key").source)
    client.hset(SCOPED, "key_9", "{}")

    def add(key: str, record: str, limit: int) -> int:
        found: int = script([KEYS, SCOPED], [key, record, limit])
        return found

    assert [add(f"key_{n}", f'{{"n":{n}}}', 3) for n in range(4)] == [1, 1, 0, 0]
    assert client.hgetall(KEYS) == {b"key_0": b'{"n":0}', b"key_1": b'{"n":1}'}
    assert add("key_0", "second", 3) == 1, "even at the limit, and nothing changes"
    assert client.hget(KEYS, "key_0") == b'{"n":0}'
    assert [add("key_3", "{}", 4), add("key_4", "{}", 3)] == [1, 0], "a lowered limit removes nothing"
    assert (client.hlen(KEYS), client.hlen(SCOPED)) == (3, 1)
