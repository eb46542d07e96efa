"""The sixteen partitions of Redis, each with its own hash tag, so that a script can access all keys of an account.

`{pNN}` is the account's partition: CRC-16 of the account id modulo 16.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{pNN}:write-check` | string | write probe: its value is not used | 60 s |
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from functools import lru_cache

# The hash tags of the partitions. Of all tags with two digits, the slots of these spread evenly: with the default slots
# of 3 to 16 primaries of Redis Cluster, the numbers of partitions per primary differ by at most one.
PARTITION_TAGS = tuple("{p%02d}" % n for n in (9, 13, 18, 19, 26, 32, 37, 38, 43, 44, 46, 49, 84, 86, 87, 96))
CACHE_SIZE = 4_096  # tags of accounts, and hashes of users


@lru_cache(CACHE_SIZE)
def partition_tag(account_id: str) -> str:
    return PARTITION_TAGS[binascii.crc_hqx(account_id.encode(), 0) % len(PARTITION_TAGS)]


def write_check_key(tag: str) -> str:
    return f"{tag}:write-check"


def stream_key(tag: str, stream: str) -> str:
    """Returns the key of the stream `events` or `builds` of a partition."""
    return f"{tag}:{stream}"


# -- functions that build the keys of one kind ---------------------------------------------------------------


def keys_of_all(kind: str) -> Callable[[str], str]:
    """Returns the function from an id to a key outside the partitions."""
    return lambda of: f"{kind}:{of}"


def keys_of_partition(kind: str) -> Callable[[str], str]:
    """Returns the function from a partition's tag to its key."""
    return lambda tag: f"{tag}:{kind}"


def keys_in_partition(kind: str) -> Callable[[str, str], str]:
    """Returns the function from a partition's tag and an id, such as that of an app, to a key of the partition."""
    return lambda tag, of: f"{tag}:{kind}:{of}"


def keys_of_account(kind: str) -> Callable[[str], str]:
    """Returns the function from an account's id to its key."""
    return lambda account_id: f"{partition_tag(account_id)}:{kind}:{account_id}"


def keys_in_account(kind: str) -> Callable[[str, str], str]:
    """Returns the function from an account's id and another id to a key in the account's partition."""
    return lambda account_id, of: f"{partition_tag(account_id)}:{kind}:{of}"
