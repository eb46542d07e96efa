"""Copies the records from Redis into a backup, and writes them back.

Records are copied as names and values, which any Redis or Valkey takes, with commands that the access list allows. All
records of an account are copied at one moment (`lua/backup/copy_keys.lua`). Accounts follow one after the other. The
look-ups of all accounts come last, so they may be a little newer: a name without its app, or an app without its name,
is like what a process leaves that dies in between, and the registry ignores it.

Reservations are not copied. When a day's spend is written back, money that was reserved counts as settled, so a
restored day never has less than the backup. A deploy that was in progress is canceled: its queue is not restored.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gateway.accounts.records import Account
from gateway.data.records import Snapshot, snapshot_key
from gateway.deploys.records import FINAL
from gateway.deploys.serving import Wanted
from gateway.ids import now_iso
from gateway.inference.spend.limits import cap_of
from gateway.keys import APP, BACKED_UP, LEFT_OUT, kind_of, spend_key, tag_of
from gateway.loops import batched
from gateway.redis.client import Store
from gateway.settings import Settings
from workers.backup.scripts import KeyCopy, copy_keys
from workers.backup.target import Lines
from workers.hosting.archives import archive_key

KEYS_PER_CALL = 200  # that are copied in one step, in which Redis does nothing else
KEYS_PER_WRITE = 200
PARALLEL = 16  # calls of Redis
SPEND_SECONDS = 35 * 86_400  # that the spend of a day is kept
# Records that need not be of the same moment as the others of their account; there may be thousands.
INDEPENDENT = ("deploy", "request-log", "spend", "spend-by-user", "usage", "usage-by-provider")
CANCELED = "the service was restored from a backup during this deploy; deploy again"


class Copied(msgspec.Struct):
    """What a copy of the records consists of, and what it needs beside it."""

    accounts: int = 0
    apps: int = 0
    objects: set[str] = msgspec.field(default_factory=set)  # keys in the storage that the records name


class Owned(msgspec.Struct, frozen=True):
    """What a backup reads of an app's record."""

    id: str
    account: str


# -- from Redis ----------------------------------------------------------------------------------------------


async def copy_records(store: Store, lines: Lines) -> Copied:
    """Raises BackboneUnavailable and StorageUnavailable."""
    copied = Copied()
    keys = [key for key in await store.list_keys() if kind_of(key) in BACKED_UP]
    owners = await _find_owners(store, keys)
    for calls in batched(_split(_group(keys, owners)), PARALLEL):
        for copies in await asyncio.gather(*(_copy(store, call) for call in calls)):
            for copy in copies:
                kind = kind_of(copy.key)
                copied.accounts += kind == "account" and copy.kind == "string"
                copied.apps += kind == APP
                with suppress(msgspec.MsgspecError):  # a broken record must not prevent the backup of the others
                    copied.objects.update(_find_objects(kind, copy))
                await lines.write(copy)
    await lines.flush()
    return copied


def _split(groups: Iterable[list[str]]) -> Iterator[list[str]]:
    """Splits the groups whose records need not be of the same moment."""
    for group in groups:
        if tag_of(group[0]) and kind_of(group[0]) not in INDEPENDENT:
            yield group
        else:
            yield from batched(group, KEYS_PER_CALL)


async def _copy(store: Store, keys: Sequence[str]) -> list[KeyCopy]:
    if tag_of(keys[0]):
        return await copy_keys(store, keys)
    return [copy for copies in await asyncio.gather(*(copy_keys(store, [key]) for key in keys)) for copy in copies]


async def _find_owners(store: Store, keys: Iterable[str]) -> dict[str, str]:
    """Returns the account of each app, by the app's id."""
    owners: dict[str, str] = {}
    for batch in batched((key for key in keys if kind_of(key) == APP), KEYS_PER_CALL):
        for text in await store.get_all(batch):
            with suppress(msgspec.MsgspecError):
                record = msgspec.json.decode(text or "{}", type=Owned)
                owners[record.id] = record.account
    return owners


def _group(keys: Iterable[str], owners: Mapping[str, str]) -> Iterator[list[str]]:
    """Yields the keys that are copied together: those of an account, the rest of a partition, and all others."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for key in sorted(keys):
        tag, kind = tag_of(key), kind_of(key)
        if not tag:
            groups["~", "", ""].append(key)
        elif kind in INDEPENDENT:
            groups[tag, kind, ""].append(key)
        else:
            ids = key.split(":")[2:]
            owner = next((owners.get(each, each) for each in ids if each in owners or each.startswith("acc_")), "~")
            groups[tag, "", owner].append(key)
    for _, group in sorted(groups.items()):
        yield group


def _find_objects(kind: str, copy: KeyCopy) -> Iterator[str]:
    """Yields the objects of the storage without which the record is of no use."""
    values = copy.values[1::2]
    if kind == "serving" and copy.kind == "hash":
        for text in values:
            wanted = msgspec.json.decode(text, type=Wanted)
            yield from (archive_key(wanted.app, deploy) for deploy in wanted.releases if deploy == wanted.serves)
    elif kind == "data-snapshots":
        app_id = copy.key.rpartition(":")[2]
        yield from (snapshot_key(app_id, msgspec.json.decode(text, type=Snapshot).id) for text in values)


# -- to Redis ------------------------------------------------------------------------------------------------


def is_known(key: str) -> bool:
    """Returns whether the key is one of this service's."""
    return kind_of(key) in BACKED_UP | LEFT_OUT


async def write_records(store: Store, lines: Iterable[bytes], now: int) -> None:
    """Writes records as a restored service needs them. `now` is in ms. Raises BackboneUnavailable.

    Leaves out keys of a kind that no backup has, such as sessions, and keys of other programs in the same Redis.
    """
    copies = map(msgspec.json.Decoder(KeyCopy).decode, lines)
    kept = (copy for copy in copies if kind_of(copy.key) in BACKED_UP and (copy.expires < 0 or copy.expires > now))
    for batch in batched(map(_try_to_revise, kept), KEYS_PER_WRITE):
        async with store.client.pipeline(transaction=False) as pipe:
            for copy in batch:
                pipe.delete(copy.key)
                if copy.values:
                    _write(pipe, copy)
                    if copy.expires >= 0:
                        pipe.pexpireat(copy.key, copy.expires)
            await pipe.execute()


def _write(pipe: Any, copy: KeyCopy) -> None:
    values = copy.values
    match copy.kind:
        case "string":
            pipe.set(copy.key, values[0])
        case "hash":
            pipe.hset(copy.key, items=values)
        case "set":
            pipe.sadd(copy.key, *values)
        case "list":
            pipe.rpush(copy.key, *values)
        case "zset":
            scored = [part for member, score in zip(values[::2], values[1::2], strict=True) for part in (score, member)]
            pipe.execute_command("ZADD", copy.key, *scored)


def _try_to_revise(copy: KeyCopy) -> KeyCopy:
    try:
        return _revise(copy)
    except (ValueError, msgspec.MsgspecError):  # a broken record stays as it is
        return copy


def _revise(copy: KeyCopy) -> KeyCopy:
    kind = kind_of(copy.key)
    if copy.kind != "hash" or kind not in ("spend", "spend-by-user", "deploy", "site", "serving"):
        return copy
    fields = dict(zip(copy.values[::2], copy.values[1::2], strict=True))
    if kind in ("spend", "spend-by-user"):
        fields = _settle_all(fields)
    elif kind == "deploy" and fields.get("state") not in FINAL:
        fields |= {"state": "canceled", "error": CANCELED, "finishedAt": now_iso()}
    elif kind == "site":
        fields = {name: value for name, value in fields.items() if not name.startswith("queued:")}
    elif kind == "serving":
        fields = dict(_end_steps(fields))
    return msgspec.structs.replace(copy, values=[part for pair in fields.items() for part in pair])


def _settle_all(fields: Mapping[str, str]) -> dict[str, str]:
    """Counts reserved money as settled, at its bound: nobody knows what was spent of it."""
    settled = {name: value for name, value in fields.items() if not name.startswith("reserved")}
    for name in fields.keys() - settled.keys():
        counted = name.replace("reserved", "settled", 1)
        settled[counted] = str(int(settled.get(counted, 0)) + max(0, int(fields[name])))
    return settled


def _end_steps(fields: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the records of what is served, without the deploys that were in progress."""
    for name, text in fields.items():
        wanted = msgspec.json.decode(text, type=Wanted)
        if wanted.step != "live":
            if not wanted.served:
                continue
            releases = {deploy: each for deploy, each in wanted.releases.items() if deploy != wanted.deploy}
            wanted = Wanted(wanted.account, wanted.app, wanted.address, "live", wanted.served, "", releases)
        yield name, msgspec.json.encode(wanted).decode()


async def spend_today(store: Store, settings: Settings) -> None:
    """Uses up the caps of all accounts for this UTC day, by Redis's clock. Raises BackboneUnavailable."""
    day = await store.today()
    accounts = [key for key in await store.list_keys() if kind_of(key) == "account" and key.count(":") == 2]
    for batch in batched(accounts, KEYS_PER_WRITE):
        texts = await store.get_all(batch)
        found = [msgspec.json.decode(text, type=Account) for text in texts if text is not None]
        keys = [spend_key(account.id, day) for account in found]
        spent = await store.read_each(keys, lambda pipe, key: pipe.hget(key, "settled"))
        async with store.client.pipeline(transaction=False) as pipe:
            for account, key, settled in zip(found, keys, spent, strict=True):
                pipe.hset(key, "settled", max(int(settled or 0), cap_of(account, settings)))
                pipe.expire(key, SPEND_SECONDS)
            await pipe.execute()
