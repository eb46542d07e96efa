"""The spend of a deleted app stays in the day's sum, without fields of its own."""

from typing import Any

import pytest

from tests.lua.scripts import source

SPEND = "{p09}:spend:acc:2026-11-21"


@pytest.mark.parametrize(
    ("before", "folded", "after"),
    [
        ({"settled": 7, "settled:app": 5, "reserved:app": 0}, 1, {"settled": 7, "settled:deleted": 5}),
        ({"settled:app": 5, "settled:deleted": 2, "settled:app2": 1}, 1, {"settled:deleted": 7, "settled:app2": 1}),
        ({"settled:app": 5, "reserved:app": 3}, 0, {"settled:app": 5, "reserved:app": 3}),
        ({"settled:app2": 5}, 0, {"settled:app2": 5}),
    ],
)
def test_its_fields_become_one(client: Any, before: dict[str, int], folded: int, after: dict[str, int]) -> None:
    client.hset(SPEND, mapping=before)
    client.expire(SPEND, 60)
    assert client.register_script(source("accounts/forget_app"))([SPEND], ["app"]) == folded
    assert {name.decode(): int(value) for name, value in client.hgetall(SPEND).items()} == after
