"""Only the host that knows the present claim can change it."""

from typing import Any

from gateway.redis.client import Script
from tests.lua.scripts import TAG

KEY = f"{TAG}:claims"


def test_a_claim_replaces_only_the_one_that_was_read(client: Any) -> None:
    script = client.register_script(Script("deploys/set_claim").source)

    def set_claim(before: str, after: str, change: str = "x", app: str = "shop") -> int:
        return script([KEY], [app, before, after, change])

    assert set_claim("", "one", "first") == 1
    assert set_claim("", "two", "second") == 0
    assert set_claim("other", "two", "second") == 0
    assert client.hgetall(KEY) == {b"shop": b"one", b"version": b"first"}
    assert set_claim("one", "two", "second") == 1
    assert client.hgetall(KEY) == {b"shop": b"two", b"version": b"second"}
    assert set_claim("one", "", "third") == 0
    assert set_claim("two", "", "third") == 1
    assert client.hgetall(KEY) == {b"version": b"third"}
    assert set_claim("", "", app="other") == 1
