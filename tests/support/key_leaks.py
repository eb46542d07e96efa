"""Finds leaked Redis keys: those without an expiry that no declaration in `gateway/keys.py` explains.

Reservations and their leases do not expire either, and leak nevertheless, because a test must settle all of them.
"""

import re

import redis

from gateway.keys import KEYS


def pattern(name: str) -> str:
    """Returns a regular expression of the keys that are declared under this name."""
    escaped = re.sub(r"<[^>]+>", r"\\S+", re.escape(name))
    return escaped.replace(r"\{pNN\}", r"\{.*\}").replace(r"\[", "(").replace(r"\]", ")?")


SETTLED = ("{pNN}:reservations", "{pNN}:leases")
ENDLESS = [key.name for key in KEYS if not key.ends[0].isdigit() and key.name not in SETTLED]
EXPLAINED = re.compile("|".join(map(pattern, ENDLESS)))


def find_leaks(client: redis.Redis) -> list[str]:
    names = [key.decode() for key in client.scan_iter(count=1000)]
    return sorted(name for name in names if client.ttl(name) == -1 and not EXPLAINED.fullmatch(name))


def assert_no_leak(client: redis.Redis) -> None:
    leaked = find_leaks(client)
    assert not leaked, f"keys without expiry or reason: {leaked}"
