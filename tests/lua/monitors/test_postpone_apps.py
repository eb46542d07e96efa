"""Claimed apps that are not inspected are due later, but not those that have become due meanwhile."""

from typing import Any

from tests.lua.scripts import TAG, source

DUE, LEASE_END, TOMORROW = f"{TAG}:certificates", 1_795_262_415_000, 1_795_348_800_000


def test_only_apps_that_are_still_due_at_the_end_of_the_lease(client: Any) -> None:
    client.zadd(DUE, {"a": LEASE_END, "b": LEASE_END, "changed": 0, "claimed-by-another": LEASE_END + 1})
    again = {"a": TOMORROW, "b": TOMORROW + 1, "changed": TOMORROW, "claimed-by-another": TOMORROW, "gone": TOMORROW}
    args = [part for pair in again.items() for part in pair]
    postpone = client.register_script(source("monitors/postpone_apps"))
    assert postpone([DUE], [LEASE_END, *args]) == 2
    assert dict(client.zrange(DUE, 0, -1, withscores=True)) == {
        b"a": TOMORROW,
        b"b": TOMORROW + 1,
        b"changed": 0,
        b"claimed-by-another": LEASE_END + 1,
    }
