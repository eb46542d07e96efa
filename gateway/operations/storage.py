"""Lists the dead letters of all partitions, and the accounts that store the most in Redis."""

import msgspec

from gateway.accounts.registry import Registry
from gateway.events import scripts
from gateway.events.deliveries import SHARE_BYTES
from gateway.ids import Time, now_iso
from gateway.keys import PARTITION_TAGS, dead_letters_key, stored_key
from gateway.redis.client import Store

TOP_ACCOUNTS = 8
NEWEST_LETTERS = 10


class DeadLetter(msgspec.Struct):
    """An entry of a stream that no worker could process."""

    stream: str
    entry: str  # its id in the stream
    at: Time  # of its removal from the stream
    reason: str
    fields: dict[str, str]  # each cut to its beginning


class DeadLetters(msgspec.Struct):
    count: int  # of 30 days, at most 100 per partition
    newest: list[DeadLetter]


class StoredAccount(msgspec.Struct):
    account: str
    name: str
    bytes: int  # of its delivery log and the data of its events


class StorageByAccount(msgspec.Struct):
    limit: int  # bytes per account
    top: list[StoredAccount]


async def count_dead_letters(store: Store) -> int:
    """Raises BackboneUnavailable."""
    return sum(await store.read_each(PARTITION_TAGS, lambda pipe, tag: pipe.xlen(dead_letters_key(tag))))


async def read_dead_letters(store: Store) -> DeadLetters:
    """Raises BackboneUnavailable."""
    pages = await store.read_each(
        PARTITION_TAGS, lambda pipe, tag: pipe.xrevrange(dead_letters_key(tag), count=NEWEST_LETTERS)
    )
    letters = [letter for page in pages for letter in page]
    letters.sort(key=lambda letter: -int(letter[0].partition("-")[0]))
    return DeadLetters(await count_dead_letters(store), [_dead_letter(*letter) for letter in letters[:NEWEST_LETTERS]])


def _dead_letter(letter_id: str, letter: dict[str, str]) -> DeadLetter:
    at = now_iso(int(letter_id.partition("-")[0]) / 1000)
    try:
        fields = msgspec.json.decode(letter.get("fields", ""), type=dict[str, str])
    except msgspec.DecodeError:  # not written by the service; it must not hide the others
        fields = {}
    return DeadLetter(letter.get("stream", ""), letter.get("entry", ""), at, letter.get("reason", ""), fields)


async def read_storage(store: Store, registry: Registry) -> StorageByAccount:
    """Returns the accounts that store the most. Raises BackboneUnavailable."""
    pages = await store.read_each(
        PARTITION_TAGS, lambda pipe, tag: pipe.zrevrange(stored_key(tag), 0, TOP_ACCOUNTS - 1, withscores=True)
    )
    stored = [(account, int(count)) for page in pages for account, count in page]
    top = []
    for account, count in sorted(stored, key=lambda each: -each[1])[:TOP_ACCOUNTS]:
        if await scripts.forget_stored_bytes(store, account):
            continue
        record = await registry.account(account)
        top.append(StoredAccount(account, record.name if record else "", count))
    return StorageByAccount(SHARE_BYTES, top)
