"""A notice has one outcome."""

from typing import Any

from tests.lua.scripts import TAG, source

STREAM, OUTCOMES, GROUP = f"{TAG}:mails", f"{TAG}:mails:outcomes", "notices"


def test_recorded_once(client: Any) -> None:
    script = client.register_script(source("events/record_notice"))
    client.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    entry = client.xadd(STREAM, {"account": "acc"})
    client.xreadgroup(GROUP, "one", {STREAM: ">"})
    assert script([STREAM, OUTCOMES], [GROUP, entry, "sent"]) == 1
    assert script([STREAM, OUTCOMES], [GROUP, entry, "failed"]) == 0
    assert client.hgetall(OUTCOMES) == {b"sent": b"1"}
    assert client.xlen(STREAM) == 0
