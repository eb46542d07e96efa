"""One worker at a time changes what a cluster serves."""

from typing import Any

from tests.lua.scripts import source

KEY = "{sites}:engine"


def test_one_worker_holds_the_lease_until_it_ends(client: Any) -> None:
    script = client.register_script(source("deploys/hold_engine"))

    def hold(worker: str, lifetime: int = 15_000) -> int:
        held: int = script([KEY], [worker, lifetime])
        return held

    assert [hold("one"), hold("two"), hold("one")] == [1, 0, 1]
    assert 14_000 < client.pttl(KEY) <= 15_000
    assert [hold("two", 0), hold("two"), hold("one", 0), hold("two")] == [0, 0, 0, 1]
    client.pexpire(KEY, 1)
    while client.exists(KEY):
        pass
    assert hold("one") == 1
