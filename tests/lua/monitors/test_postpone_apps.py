"""Claimed apps that are not inspected are due later, but not those that have become due meanwhile."""

from typing import Any

from tests.lua.scripts import TAG, source

DUE, HELD_UNTIL, TOMORROW = f"{TAG}:certificates", 1_795_262_415_000, 1_795_348_800_000


def test_only_apps_that_are_still_due_at_the_end_of_the_hold(client: Any) -> None:
    client.zadd(DUE, {"a": HELD_UNTIL, "b": HELD_UNTIL, "changed": 0, "taken-by-another": HELD_UNTIL + 1})
    again = {"a": TOMORROW, "b": TOMORROW + 1, "changed": TOMORROW, "taken-by-another": TOMORROW, "gone": TOMORROW}
    args = [part for pair in again.items() for part in pair]
    postpone = client.register_script(source("monitors/postpone_apps"))
    assert postpone([DUE], [HELD_UNTIL, *args]) == 2
    assert dict(client.zrange(DUE, 0, -1, withscores=True)) == {
        b"a": TOMORROW,
        b"b": TOMORROW + 1,
        b"changed": 0,
        b"taken-by-another": HELD_UNTIL + 1,
    }
