"""Packs the data of apps into objects of the storage, and unpacks them: snapshots, and copies for other hosts."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from gateway.accounts.registry import Registry
from gateway.cancellation import run_in_thread
from gateway.data.records import DataRecords, snapshot_key
from gateway.redis.client import until_redis_answers
from gateway.settings import Settings
from gateway.storage import fetch_object, open_storage
from workers.hosting.data import AppData
from workers.hosting.packing import DataError, SandboxPacker
from workers.sandbox.sandbox import MIB, Sandbox

ARCHIVE_BYTES = 1 << 36  # of a snapshot; the limit of the data bounds it first
PARALLEL, PARALLEL_OF_ACCOUNT = 4, 2  # commands and copies
COPY = "copy"  # in place of a deploy, when another host's data replace those of this one


class Turns:
    """Who may work on the data of which app."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by app
        self._slots = asyncio.Semaphore(PARALLEL)
        self._slots_of_accounts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def exclusive(self, app_id: str, account: str) -> AsyncIterator[None]:
        """Excludes other work on the app's data, and bounds the work on the account's data and on all data."""
        lock = self._locks.setdefault(app_id, asyncio.Lock())
        slots = self._slots_of_accounts.setdefault(account, asyncio.Semaphore(PARALLEL_OF_ACCOUNT))
        async with lock, slots, self._slots:
            yield


class DataPacker(SandboxPacker):
    """Packs into the storage, and unpacks from it."""

    def __init__(self, settings: Settings, registry: Registry, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self._settings, self._registry, self._storage = settings, registry, open_storage(settings)
        self.turns = Turns()

    async def prepare(self, data: AppData, account_id: str) -> int:
        """Creates the folder of the account's data. Sets their limit by the plan, and returns it. Raises DataHeld."""
        limit = await find_data_limit(self._settings, self._registry, account_id)
        with data.running(account_id, limit):
            data.limit = limit
        return limit

    @asynccontextmanager
    async def fetched(self, data: AppData, key: str, limit: int, digest: str = "") -> AsyncIterator[Path]:
        """Unpacks an object of the storage, if it has this SHA-256 ('' for any). Yields a folder. Raises DataError."""
        archive = data.folder / "incoming.tar.gz"
        try:
            if not await fetch_object(self._storage, key, archive, ARCHIVE_BYTES):
                raise DataError("the snapshot is no longer kept")
            if digest and await run_in_thread(_digest, archive) != digest:
                raise DataError("the snapshot is damaged")
            async with self.unpacked(data, archive, limit) as incoming:
                yield incoming
        finally:
            archive.unlink(missing_ok=True)

    async def fetch_newest(self, data: AppData, account: str) -> bool:
        """Replaces the data by their newest snapshot, if there is one. The app does not run.

        Raises DataError, DataHeld and StorageUnavailable.
        """
        records = DataRecords(self._registry.store)
        if snapshots := await until_redis_answers(lambda: records.list_snapshots(account, data.app_id)):
            await self.fetch_copy(data, account, snapshot_key(data.app_id, snapshots[0].id), "")
        return bool(snapshots)

    # -- copies for other hosts ------------------------------------------------------------------------------

    async def store_copy(self, data: AppData, key: str) -> str:
        """Packs the data into an object of the storage. Returns its SHA-256.

        Raises DataError and StorageUnavailable.
        """
        async with self.turns.exclusive(data.app_id, data.account), self.packed(data, data.files) as (packed, _):
            digest = await run_in_thread(_digest, packed)
            await self._storage.put(key, packed)
        return digest

    async def fetch_copy(self, data: AppData, account: str, key: str, digest: str) -> None:
        """Replaces the data by those of an object of the storage. The app does not run.

        Raises DataError, DataHeld and StorageUnavailable.
        """
        async with self.turns.exclusive(data.app_id, account):
            limit = 2 * max(await self.prepare(data, account), MIB)  # apps exceed limits for seconds
            await run_in_thread(data.confirm, COPY)  # left by a worker that was killed
            async with self.fetched(data, key, limit, digest) as incoming:
                await run_in_thread(data.replace, incoming, COPY)
                await run_in_thread(data.confirm, COPY)


async def find_data_limit(settings: Settings, registry: Registry, account_id: str) -> int:
    """Returns the bytes that the data of each app may take, by the account's plan."""
    account = await until_redis_answers(lambda: registry.account(account_id))
    return settings.app_data["free" if account is None else account.plan] * MIB


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
