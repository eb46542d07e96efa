"""The records of apps' data: what the host of an app reports, the snapshots, and the data of deleted apps.

The data themselves are on the host that runs the app (`workers/engine/app_data.py`). A snapshot is an object in the
storage, and its record is in Redis. Records and objects are separate for each account, because an app of the same id
may later belong to another account. Only the host of the data adds and removes snapshots.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from gateway.accounts.records import App
from gateway.ids import Time, now_iso
from gateway.keys import (
    PARTITION_TAGS,
    data_deletions_key,
    data_snapshots_key,
    data_status_key,
    deleted_data_key,
    partition_tag,
)
from gateway.redis.client import Store

STATUS_SECONDS = 7 * 86_400  # after the last report of a host
DELETED_SECONDS = 7 * 86_400  # that the snapshots of a deleted app are kept
FOLDER, SUFFIX = "data/", ".tar.gz"  # in the storage

DataState = Literal["running", "asleep", "restoring", "full", "none"]
Reason = Literal["deploy", "daily", "manual", "restore", "clear", "backup", "stop"]
KEPT: dict[Reason, int] = {"deploy": 5, "daily": 7, "manual": 5, "restore": 2, "clear": 2, "backup": 1, "stop": 1}


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    at: Time
    bytes: int  # of the archive
    reason: Reason
    deployId: str | msgspec.UnsetType = msgspec.UNSET  # the deploy before which it was made


class DataStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The report of the host that has an app's data."""

    usedBytes: int = 0
    state: DataState = "none"
    problem: str = ""


class DeletedData(msgspec.Struct, frozen=True):
    """The data of a deleted app."""

    app: str  # its name
    appId: str
    deletedAt: Time
    snapshots: list[Snapshot]


def snapshot_key(app_id: str, snapshot_id: str) -> str:
    """Returns the key of a snapshot in the storage."""
    return f"{FOLDER}{app_id}/snapshots/{snapshot_id}{SUFFIX}"


class DataRecords:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def read_status(self, app: App) -> DataStatus:
        record = await self._store.get(data_status_key(app.account, app.id))
        return msgspec.json.decode(record, type=DataStatus) if record else DataStatus()

    async def has_data(self, account_id: str, app_id: str) -> bool:
        """Returns whether a host has reported data of the app."""
        return await self._store.get(data_status_key(account_id, app_id)) is not None

    async def write_statuses(self, statuses: Sequence[tuple[str, str, DataStatus]]) -> None:
        """Writes the reports of a host, each with its account and app."""
        await self._store.read_each(
            statuses,
            lambda pipe, each: pipe.set(
                data_status_key(each[0], each[1]), msgspec.json.encode(each[2]).decode(), ex=STATUS_SECONDS
            ),
        )

    # -- snapshots -------------------------------------------------------------------------------------------

    async def list_snapshots(self, account_id: str, app_id: str) -> list[Snapshot]:
        """Returns the snapshots, newest first."""
        records = await self._store.client.hvals(data_snapshots_key(account_id, app_id))
        return _newest_first(msgspec.json.decode(record, type=Snapshot) for record in records)

    async def find_newest(self, apps: Sequence[tuple[str, str]]) -> list[str]:
        """Returns the id of the newest snapshot of each app, by account and app; '' for none."""
        found = await self._store.read_each(apps, lambda pipe, each: pipe.hkeys(data_snapshots_key(*each)))
        return [max(ids, default="") for ids in found]

    async def add_snapshot(self, account_id: str, app_id: str, snapshot: Snapshot) -> list[str]:
        """Records a snapshot. Returns the ids of those that it replaces, which are no longer recorded."""
        key = data_snapshots_key(account_id, app_id)
        await self._store.client.hset(key, snapshot.id, msgspec.json.encode(snapshot).decode())
        alike = [each for each in await self.list_snapshots(account_id, app_id) if each.reason == snapshot.reason]
        replaced = [each.id for each in alike[KEPT[snapshot.reason] :]]
        if replaced:
            await self._store.client.hdel(key, *replaced)
        return replaced

    async def find_snapshot(self, app: App, snapshot_id: str) -> str | None:
        """Returns the storage's key of a snapshot of the app, or of a deleted app of its account."""
        if await self._store.client.hget(data_snapshots_key(app.account, app.id), snapshot_id) is not None:
            return snapshot_key(app.id, snapshot_id)
        for deleted in await self.list_deleted(app.account):
            if any(snapshot.id == snapshot_id for snapshot in deleted.snapshots):
                return snapshot_key(deleted.appId, snapshot_id)
        return None

    # -- data of deleted apps --------------------------------------------------------------------------------

    async def list_deleted(self, account_id: str) -> list[DeletedData]:
        """Returns the data of deleted apps, last deleted first."""
        records = await self._store.client.hvals(deleted_data_key(account_id))
        found = [msgspec.json.decode(record, type=DeletedData) for record in records]
        oldest = now_iso(time.time() - DELETED_SECONDS)
        kept = [each for each in found if each.deletedAt > oldest and each.snapshots]
        return sorted(kept, key=lambda each: each.deletedAt, reverse=True)

    async def move_to_deleted(self, app: App, record_id: str) -> bool:
        """Keeps the snapshots of an app that is being deleted. Returns False if the app has no data."""
        snapshots = await self.list_snapshots(app.account, app.id)
        if not snapshots and not await self.has_data(app.account, app.id):
            return False
        deleted = DeletedData(app.name, app.id, now_iso(), snapshots)
        await self._write_deleted(app.account, record_id, deleted)
        # The list of deletions comes first: whatever is interrupted, the snapshots are removed some day.
        await self._store.client.delete(data_snapshots_key(app.account, app.id), data_status_key(app.account, app.id))
        return True

    async def _write_deleted(self, account_id: str, record_id: str, deleted: DeletedData) -> None:
        key, tag = deleted_data_key(account_id), partition_tag(account_id)
        async with self._store.client.pipeline(transaction=True) as pipe:
            pipe.zadd(data_deletions_key(tag), {f"{account_id} {record_id}": int(time.time() * 1000)}, nx=True)
            pipe.hset(key, record_id, msgspec.json.encode(deleted).decode())
            pipe.expire(key, DELETED_SECONDS + 86_400)
            await pipe.execute()

    async def add_last_snapshot(self, account_id: str, record_id: str, snapshot: Snapshot) -> bool:
        """Adds the snapshot that was made at the deletion. Returns False if it is too late for that."""
        deleted = await self.read_deleted(account_id, record_id)
        if deleted is None:
            return False
        others = [each for each in deleted.snapshots if each.id != snapshot.id]
        deleted = msgspec.structs.replace(deleted, snapshots=[snapshot, *others])
        await self._write_deleted(account_id, record_id, deleted)
        return True

    async def read_deleted(self, account_id: str, record_id: str) -> DeletedData | None:
        record = await self._store.client.hget(deleted_data_key(account_id), record_id)
        return msgspec.json.decode(record, type=DeletedData) if record else None

    async def list_expired(self) -> list[tuple[str, str]]:
        """Returns account and record id of the deletions whose snapshots are to be removed."""
        until = int((time.time() - DELETED_SECONDS) * 1000)
        found = await self._store.read_each(
            PARTITION_TAGS,
            lambda pipe, tag: pipe.zrangebyscore(data_deletions_key(tag), "-inf", until, start=0, num=100),
        )
        return [(account, record_id) for names in found for account, _, record_id in (n.partition(" ") for n in names)]

    async def remove_deleted(self, account_id: str, record_id: str) -> None:
        await self._store.client.hdel(deleted_data_key(account_id), record_id)
        await self._store.client.zrem(data_deletions_key(partition_tag(account_id)), f"{account_id} {record_id}")


def _newest_first(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    return sorted(snapshots, key=lambda snapshot: snapshot.id, reverse=True)
