"""The sixteen partitions of Redis, each with its own hash tag, so that a script can access all keys of an account.

`{pNN}` is the account's partition: CRC-16 of the account id modulo 16.

| key | type | holds | expires |
| --- | --- | --- | --- |
| `{pNN}:write-check` | string | write probe: its value is not used | 60 s |
"""

from __future__ import annotations

import binascii
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
