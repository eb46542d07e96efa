"""Packs the data of apps into objects of the storage, and unpacks them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from gateway.accounts.registry import Registry
from gateway.cancellation import run_in_thread
from gateway.data.records import DataRecords, snapshot_key
from gateway.redis.client import until_redis_answers
from gateway.settings import Settings
from gateway.storage import fetch_object, open_storage
from workers.hosting.data import AppData
from workers.hosting.packing import NOT_STOPPED, DataError, SandboxPacker
from workers.sandbox.sandbox import MIB, Sandbox

ARCHIVE_BYTES = 1 << 36  # of a snapshot; the limit of the data bounds it first
PARALLEL, PARALLEL_OF_ACCOUNT = 4, 2


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
    async def fetched(self, data: AppData, key: str, limit: int) -> AsyncIterator[Path]:
        """Unpacks an object of the storage. Yields a folder. Raises DataError."""
        archive = data.folder / "incoming.tar.gz"
        try:
            if not await fetch_object(self._storage, key, archive, ARCHIVE_BYTES):
                raise DataError("the snapshot is no longer kept")
            async with self.unpacked(data, archive, limit) as incoming:
                yield incoming
        finally:
            archive.unlink(missing_ok=True)

    async def fetch_newest(self, data: AppData, account: str) -> str:
        """Replaces the data by their newest snapshot, if there is one. Until that has succeeded, the app does not run.

        Returns the snapshot's id, or ''. Raises DataError and StorageUnavailable.
        """
        records = DataRecords(self._registry.store)
        async with self.turns.exclusive(data.app_id, account):
            [newest] = await until_redis_answers(lambda: records.find_newest([(account, data.app_id)]))
            if newest:
                limit = await find_data_limit(self._settings, self._registry, account)
                await run_in_thread(data.mark_stale, account, limit)
                await self._replace(data, newest, 2 * max(limit, MIB))  # apps exceed limits for seconds
            data.unmark_stale()
            return newest

    async def _replace(self, data: AppData, snapshot_id: str, limit: int) -> None:
        await run_in_thread(data.confirm, snapshot_id)  # left by a worker that was killed
        source = snapshot_key(data.app_id, snapshot_id)
        async with self.fetched(data, source, limit) as incoming, stopped(data):
            await run_in_thread(data.replace, incoming, snapshot_id)
            data.note_snapshot(snapshot_id)
            await run_in_thread(data.confirm, snapshot_id)


@asynccontextmanager
async def stopped(data: AppData) -> AsyncIterator[None]:
    """Stops the processes of the app, and starts none within the context. Raises DataError."""
    with ExitStack() as stack:
        try:
            await run_in_thread(stack.enter_context, data.stopped())
        except TimeoutError:
            raise DataError(NOT_STOPPED) from None
        yield


async def find_data_limit(settings: Settings, registry: Registry, account_id: str) -> int:
    """Returns the bytes that the data of each app may take, by the account's plan."""
    account = await until_redis_answers(lambda: registry.account(account_id))
    return settings.app_data["free" if account is None else account.plan] * MIB
