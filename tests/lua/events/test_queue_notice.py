"""A notice is queued once for each address that wants it."""

from typing import Any

import msgspec

from tests.lua.scripts import TAG, source

NOTICES, STREAM, MARK, DELETIONS = f"{TAG}:notices:acc", f"{TAG}:mails", f"{TAG}:noticed:acc:evt", f"{TAG}:deletions"


def subscribe(client: Any, address: str, *kinds: str) -> None:
    client.hset(NOTICES, f"hash of {address}", msgspec.json.encode({"address": address, "kinds": kinds}))


def queue(client: Any, kind: str = "budget", level: int = 80, only: str = "", **bounds: int) -> int:
    script = client.register_script(source("events/queue_notice", **bounds))
    return int(script([NOTICES, STREAM, MARK, DELETIONS], ["acc", kind, level, 60, "budget", "shop", "{}", only]))


def test_only_to_addresses_that_want_this_kind(client: Any) -> None:
    assert queue(client) == 0
    subscribe(client, "ada@example.com", "budget", "finding")
    subscribe(client, "bob@example.com", "finding")
    subscribe(client, "eve@example.com", "appDown", "budget")
    assert queue(client) == 2, "a notice that nobody wanted has left no mark"
    entries = [fields for _, fields in client.xrange(STREAM)]
    assert sorted(fields[b"address"] for fields in entries) == [b"hash of ada@example.com", b"hash of eve@example.com"]
    named = {b"account": b"acc", b"kind": b"budget", b"type": b"budget", b"app": b"shop", b"data": b"{}"}
    assert all(named.items() <= fields.items() for fields in entries)


def test_not_while_the_account_is_being_deleted_nor_into_a_full_stream(client: Any) -> None:
    for name in ("ada", "bob"):
        subscribe(client, f"{name}@example.com", "budget")
    client.zadd(DELETIONS, {"acc": 1})
    assert queue(client) == 0
    client.zrem(DELETIONS, "acc")
    assert queue(client, MAX_WAITING=1) == -1
    assert client.xlen(STREAM) == 0
    assert queue(client, MAX_WAITING=2) == 2, "neither attempt left a mark"
    assert [queue(client, level=100, only="hash of eve") for _ in range(2)] == [1, 0], "she has chosen nothing"
