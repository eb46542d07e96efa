"""An API key can be revoked, unless it is the account's only one with full access."""

from typing import Any

import pytest

from gateway.redis.client import Script
from tests.lua.scripts import TAG

ZERO, ONE = b'{"id":"key_0"}', b'{"id":"key_1"}'
KEYS, SCOPED, USED = f"{TAG}:keys:acc", f"{TAG}:scoped-keys:acc", f"{TAG}:keys-used:acc"


@pytest.mark.parametrize("kept", [SCOPED, KEYS])  # the version before keeps it with the full keys
def test_only_a_full_key_can_be_the_last_one(client: Any, kept: str) -> None:
    script = client.register_script(Script("accounts/revoke_key").source)
    scoped = b'{"id":"key_2","scope":"read"}'
    client.hset(KEYS, mapping={"key_0": ZERO, "key_1": ONE})
    client.hset(kept, "key_2", scoped)
    client.hset(USED, mapping={"key_0": 1, "key_1": 2, "key_2": 3})

    def revoke(key: str, *even_last: str) -> list[bytes]:
        reply: list[bytes] = script([KEYS, SCOPED, USED], [key, *even_last])
        return reply

    for unknown in ("key_9", "", "one", "*"):
        assert revoke(unknown) == [b"unknown", b""]
    assert revoke("key_0") == [b"revoked", ZERO]
    assert revoke("key_0") == [b"unknown", b""]
    assert revoke("key_1") == revoke("key_1", "") == [b"last", b""]
    client.hset(KEYS, "key_3", b'{"id":"key_3","scope":"full"}')
    assert revoke("key_1") == [b"revoked", ONE]
    assert revoke("key_3") == [b"last", b""]
    assert revoke("key_2") == [b"revoked", scoped]
    assert (client.hkeys(KEYS), client.exists(SCOPED, USED)) == ([b"key_3"], 0)
    assert revoke("key_3", "1") == [b"revoked", b'{"id":"key_3","scope":"full"}'], "as operators may"
    assert client.exists(KEYS) == 0
