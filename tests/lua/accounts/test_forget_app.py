"""The spend of a deleted app stays in the day's sum, without fields of its own."""

from typing import Any

from tests.lua.scripts import source

SPEND = "{p09}:spend:acc:2026-11-21"


def test_its_fields_become_one(client: Any) -> None:
    script = client.register_script(source("accounts/forget_app"))
    before = {"settled": 9, "settled:app": 5, "reserved:app": 0, "settled:app2": 1, "reserved:app2": 3}
    client.hset(SPEND, mapping=before)
    client.expire(SPEND, 60)
    assert [script([SPEND], [app]) for app in ("app", "app", "app2", "app3")] == [1, 0, 0, 0]
    client.hset(SPEND, "reserved:app2", 0)
    assert script([SPEND], ["app2"]) == 1
    assert {name.decode(): int(value) for name, value in client.hgetall(SPEND).items()} == {
        "settled": 9,
        "settled:deleted": 6,
    }
