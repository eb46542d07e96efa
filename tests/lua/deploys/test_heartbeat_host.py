"""A host counts for the lifetime of its last heartbeat."""

from typing import Any

from tests.lua.scripts import SECOND, on_test_clock, set_clock

KEY = "{sites}:hosts"


def test_a_host_counts_until_its_last_heartbeat_expires(client: Any) -> None:
    script = client.register_script(on_test_clock("deploys/heartbeat_host"))

    def attend(host: str, clock: int) -> list[bytes]:
        set_clock(client, clock * SECOND)
        return sorted(script([KEY], [host, 15_000]))

    assert attend("", 1_000) == []
    assert attend("one", 1_000) == [b"one"]
    assert attend("two", 1_010) == [b"one", b"two"]
    assert attend("", 1_014) == [b"one", b"two"]
    assert attend("two", 1_016) == [b"two"]
    assert attend("one", 1_017) == [b"one", b"two"]
    assert 0 < client.pttl(KEY) <= 30_000
