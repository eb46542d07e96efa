"""An API key can be revoked, unless it is the account's only one with full access."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.redis.client import Script
from tests.lua.scripts import TAG

Revoke = Callable[..., list[bytes]]
ZERO, ONE = b'{"id":"key_0"}', b'{"id":"key_1"}'
KEYS, SCOPED, USED = f"{TAG}:keys:acc", f"{TAG}:scoped-keys:acc", f"{TAG}:keys-used:acc"


@pytest.fixture
def revoke(client: Any) -> Revoke:
    script = client.register_script(Script("accounts/revoke_key").source)
    client.hset(KEYS, mapping={"key_0": ZERO, "key_1": ONE})
    client.hset(USED, mapping={"key_0": 1, "key_1": 2})
    return lambda key, *even_last: script([KEYS, SCOPED, USED], [key, *even_last])


def test_revoked(client: Any, revoke: Revoke) -> None:
    assert revoke("key_0") == [b"revoked", ZERO]
    assert client.hgetall(KEYS) == {b"key_1": ONE}
    assert client.hgetall(USED) == {b"key_1": b"2"}
    assert revoke("key_0") == [b"unknown", b""]


def test_the_last_key_stays_unless_operators_revoke_it(client: Any, revoke: Revoke) -> None:
    revoke("key_0", "")
    assert revoke("key_1", "") == [b"last", b""]
    assert (client.hgetall(KEYS), client.hgetall(USED)) == ({b"key_1": ONE}, {b"key_1": b"2"})
    assert revoke("key_1", "1") == [b"revoked", ONE]
    assert client.exists(KEYS, USED) == 0


@pytest.mark.parametrize("kept", [SCOPED, KEYS])  # the version before keeps it with the full keys
def test_only_a_full_key_can_be_the_last_one(client: Any, revoke: Revoke, kept: str) -> None:
    scoped = b'{"id":"key_2","scope":"read"}'
    client.hset(kept, "key_2", scoped)
    client.hset(USED, "key_2", 3)
    revoke("key_0")
    assert revoke("key_1") == [b"last", b""]
    client.hset(KEYS, "key_3", b'{"id":"key_3","scope":"full"}')
    assert revoke("key_1") == [b"revoked", ONE]
    assert revoke("key_3") == [b"last", b""]
    assert revoke("key_2") == [b"revoked", scoped]
    assert (client.hkeys(KEYS), client.exists(SCOPED), client.hexists(USED, "key_2")) == ([b"key_3"], 0, False)


@pytest.mark.parametrize("key", ["key_2", "", "one", "*"])
def test_an_unknown_key(client: Any, revoke: Revoke, key: str) -> None:
    assert revoke(key) == [b"unknown", b""]
    assert client.hlen(KEYS) == 2
