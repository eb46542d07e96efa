"""A renewal returns the leases of all hosts, except those that left long ago."""

from typing import Any

from tests.lua.scripts import SECOND, on_test_clock, set_clock

KEY = "{sites}:leases"


def test_leases_stay_until_they_end_or_were_not_renewed_for_long(client: Any) -> None:
    script = client.register_script(on_test_clock("deploys/renew_lease"))

    def renew(host: str, lease: str, clock: int) -> dict[bytes, bytes]:
        set_clock(client, clock * SECOND)
        found = script([KEY], [host, lease, 60_000])
        return dict(zip(found[::2], found[1::2], strict=True))

    assert renew("one", '{"session": "a b"}', 1_000) == {b"one": b'{"session": "a b"}'}
    assert renew("two", "c", 1_010) == {b"one": b'{"session": "a b"}', b"two": b"c"}
    assert renew("two", "d", 900) == {b"one": b'{"session": "a b"}', b"two": b"d"}, "a clock that went back"
    assert renew("two", "e", 1_061) == {b"two": b"e"}
    assert client.hkeys(KEY) == [b"two"]
    assert 0 < client.pttl(KEY) <= 60_000
    assert renew("two", "", 1_062) == {}
    assert not client.exists(KEY)
