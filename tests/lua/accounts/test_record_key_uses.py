"""Uses are recorded for the keys that the account has."""

from typing import Any

from tests.lua.scripts import SECOND, TAG, at, on_test_clock, set_clock

NOON = at("2026-11-21T12:00:00.123")
KEYS, SCOPED, USED = f"{TAG}:keys:acc", f"{TAG}:scoped-keys:acc", f"{TAG}:keys-used:acc"


def test_the_time_is_the_servers_in_milliseconds(client: Any) -> None:
    """A key that was revoked leaves nothing."""
    script = client.register_script(on_test_clock("accounts/record_key_uses"))
    client.hset(KEYS, mapping={"key_0": "{}", "key_2": "{}"})
    client.hset(SCOPED, "key_1", "{}")
    set_clock(client, NOON)
    assert script([KEYS, SCOPED, USED], ["key_0", "key_1", "key_gone"]) == 2
    set_clock(client, NOON + 90 * SECOND)
    assert script([KEYS, SCOPED, USED], ["key_1"]) == 1
    first, second = NOON // 1000, NOON // 1000 + 90_000
    assert client.hgetall(USED) == {b"key_0": b"%d" % first, b"key_1": b"%d" % second}
