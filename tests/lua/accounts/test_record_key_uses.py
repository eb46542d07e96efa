"""Uses are recorded for the keys that the account has."""

from typing import Any

from tests.lua.scripts import SECOND, TAG, at, on_test_clock, set_clock

NOON = at("2026-11-21T12:00:00.123")
KEYS, SCOPED, USED = f"{TAG}:keys:acc", f"{TAG}:scoped-keys:acc", f"{TAG}:keys-used:acc"


def use(client: Any, *keys: str, now: int = NOON) -> int:
    set_clock(client, now)
    return client.register_script(on_test_clock("accounts/record_key_uses"))([KEYS, SCOPED, USED], keys)


def test_the_time_is_the_servers_in_milliseconds(client: Any) -> None:
    client.hset(KEYS, mapping={"key_0": "{}", "key_2": "{}"})
    client.hset(SCOPED, "key_1", "{}")
    assert use(client, "key_0", "key_1") == 2
    assert use(client, "key_1", now=NOON + 90 * SECOND) == 1
    first, second = NOON // 1000, NOON // 1000 + 90_000
    assert client.hgetall(USED) == {b"key_0": b"%d" % first, b"key_1": b"%d" % second}


def test_a_key_that_was_revoked_leaves_nothing(client: Any) -> None:
    assert use(client, "key_0") == 0
    client.hset(KEYS, "key_1", "{}")
    assert use(client, "key_0", "key_1") == 1
    assert client.hkeys(USED) == [b"key_1"]
