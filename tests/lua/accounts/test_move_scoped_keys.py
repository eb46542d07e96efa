"""Scoped API keys leave the list of full ones."""

from typing import Any

from gateway.redis.client import Script
from tests.lua.scripts import TAG

KEYS, SCOPED = f"{TAG}:keys:acc", f"{TAG}:scoped-keys:acc"
FULL = {b"key_0": b'{"id":"key_0"}', b"key_1": b'{"id":"key_1","scope":"full"}'}
LIMITED = {b"key_2": b'{"id":"key_2","scope":"read"}', b"key_3": b'{"id":"key_3","scope":"deploy","appId":"app_1"}'}


def test_moved_once(client: Any) -> None:
    move = client.register_script(Script("accounts/move_scoped_keys").source)
    client.hset(KEYS, mapping={**FULL, **LIMITED})
    client.hset(SCOPED, "key_4", '{"id":"key_4","scope":"read"}')
    assert [move([KEYS, SCOPED]) for _ in range(2)] == [2, 0]
    assert client.hgetall(KEYS) == FULL
    assert client.hgetall(SCOPED) == {**LIMITED, b"key_4": b'{"id":"key_4","scope":"read"}'}
