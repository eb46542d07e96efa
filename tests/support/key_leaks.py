"""Finds leaked Redis keys: those without an expiry that no declaration in `gateway/keys.py` explains.

Reservations and their leases do not expire either, and leak nevertheless, because a test must settle all of them.
"""

import re
from typing import Any

import redis

from gateway.keys import KEYS


def pattern(name: str) -> str:
    """Returns a regular expression of the keys that are declared under this name."""
    escaped = re.sub(r"<[^>]+>", r"\\S+", re.escape(name))
    return escaped.replace(r"\{pNN\}", r"\{.*\}").replace(r"\[", "(").replace(r"\]", ")?")


SETTLED = ("{pNN}:reservations", "{pNN}:leases")
ENDLESS = [key.name for key in KEYS if not key.ends[0].isdigit() and key.name not in SETTLED]
EXPLAINED = re.compile("|".join(map(pattern, ENDLESS)))


def find_keys(client: redis.Redis, *words: str, lasting: bool = False) -> dict[str, str]:
    """Returns the contents, as text, of the keys that contain one of the words, in their name or anywhere.

    `lasting`: without those that expire.
    """
    reads: dict[bytes, Any] = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"set": client.smembers,
        b"stream": client.xrange,
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"list": lambda key: client.lrange(key, 0, -1),
    }
    found = {}
    for key in client.scan_iter(count=1000):
        kind = client.type(key)
        if kind in reads and not (lasting and client.ttl(key) >= 0):  # some expire meanwhile
            found[key.decode()] = repr(reads[kind](key))
    return {name: text for name, text in found.items() if any(word in name or word in text for word in words)}


def find_leaks(client: redis.Redis) -> list[str]:
    names = [key.decode() for key in client.scan_iter(count=1000)]
    reading = client.pipeline(transaction=False)
    for name in names:
        reading.ttl(name)
    left = zip(names, reading.execute(), strict=True)
    return sorted(name for name, seconds in left if seconds == -1 and not EXPLAINED.fullmatch(name))


def assert_no_leak(client: redis.Redis) -> None:
    leaked = find_leaks(client)
    assert not leaked, f"keys without expiry or reason: {leaked}"
