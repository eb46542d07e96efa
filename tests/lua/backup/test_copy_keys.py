"""Keys of all types, read together with their expiries."""

import time
from typing import Any

from tests.lua.scripts import source

NAMES = ("string", "hash", "set", "list", "zset", "stream", "none")


def test_keys_of_all_types(client: Any) -> None:
    keys = [f"{{p09}}:{name}" for name in NAMES]
    client.set(keys[0], "value", px=60_000)
    client.hset(keys[1], mapping={"field": "1"})
    client.sadd(keys[2], "member")
    client.rpush(keys[3], "a", "b", "a")
    client.zadd(keys[4], {"late": 1_790_000_000_123, "early": 0.25})
    client.xadd(keys[5], {"field": "1"})
    for key in keys[1:6]:
        client.expire(key, 120)
    client.persist(keys[2])
    found = client.eval(source("backup/copy_keys"), len(keys), *keys)
    assert [kind.decode() for kind, _, _ in found] == [*NAMES]
    assert [[value.decode() for value in values] for _, _, values in found] == [
        ["value"],
        ["field", "1"],
        ["member"],
        ["a", "b", "a"],
        ["early", "0.25", "late", "1790000000123"],
        [],
        [],
    ]
    now, expiries = time.time() * 1000, [expiry for _, expiry, _ in found]
    assert 50_000 < expiries[0] - now < 61_000
    assert 110_000 < expiries[1] - now < 121_000
    assert expiries[2] == expiries[6] == -1
    client.delete(*keys)
