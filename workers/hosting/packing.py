"""Packs the data of apps into archives of the storage, and unpacks them: snapshots, and copies for other hosts.

A process in the sandbox packs them, as the app's user, while the app runs (`workers/sandbox/pack.py`). What that
process writes is as little trusted as the app: it is unpacked in the sandbox too.
"""

import asyncio
import hashlib
import os
import stat
from collections import deque
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from gateway.accounts.registry import Registry
from gateway.cancellation import run_in_thread
from gateway.data.records import DataRecords, snapshot_key
from gateway.redis.client import until_redis_answers
from gateway.settings import Settings
from gateway.storage import fetch_object, open_storage
from workers.hosting.data import AppData
from workers.hosting.releases import remove_folder
from workers.sandbox.keeper import measure_data, measure_disk
from workers.sandbox.sandbox import ARCHIVES, MIB, PACK, Command, Sandbox, SandboxLimits

logger = structlog.get_logger()

PACK_SECONDS, UNPACK_SECONDS = 1_800.0, 1_800.0
FIRST_PACK_SECONDS, PACK_BYTES_PER_SECOND = 120.0, 10 * MIB  # before that for smaller plans, because others may wait
MOST_FILES = 20_000_000  # of one app; the bytes bound them first
ARCHIVE_BYTES = 1 << 36  # of a snapshot; the limit of the data bounds it first
PARALLEL, PARALLEL_OF_ACCOUNT = 4, 2  # commands and copies
MAX_NOTES = 20
NOTE_LENGTH = 300
NOT_STOPPED = "The app did not stop in time; try again."
COPY = "copy"  # in place of a deploy, when another host's data replace those of this one


class DataError(Exception):
    """A reason why a command fails. Account holders see the message."""


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


class Packer:
    """Packs and unpacks in the sandbox. `scratch`: where archives are made; by default, beside the data."""

    def __init__(self, sandbox: Sandbox, scratch: Path | None = None) -> None:
        self._sandbox, self._scratch = sandbox, scratch

    # -- archives --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def packed(self, data: AppData, files: Path) -> AsyncIterator[tuple[Path, list[str]]]:
        """Packs the files. Yields the archive, and what it lacks. Raises DataError."""
        packed = (self._scratch or data.folder) / "packed.tar.gz"
        try:
            yield packed, await self._pack(data, files, packed)
        finally:
            packed.unlink(missing_ok=True)

    async def _pack(self, data: AppData, files: Path, packed: Path) -> list[str]:
        work = (self._scratch or data.folder) / "work"
        taken = await run_in_thread(measure_disk, files)  # may be more than the plan allows; holes would fill the disk
        most = 2 * max(data.limit or 0, taken, MIB)
        seconds = min(FIRST_PACK_SECONDS + most / PACK_BYTES_PER_SECOND, PACK_SECONDS)
        limits = SandboxLimits(seconds=seconds, memory=512 * MIB, disk=4 * most, inodes=MOST_FILES)
        notes: list[str] = []  # the first ones, and the last one

        def add_note(line: str) -> None:
            del notes[MAX_NOTES:]
            notes.append(line[:NOTE_LENGTH])

        with ExitStack() as stack:
            uid = await run_in_thread(stack.enter_context, data.user(self._sandbox, files))
            await run_in_thread(remove_folder, work)
            work.mkdir(mode=0o700)
            self._sandbox.give_to_user(work, uid)
            command = Command(
                program=PACK,
                arguments=[*map(str, (files, work / "packed", work / "copy", most))],
                folder=work,
                environment=self._sandbox.environment,
                write=[work, files],
                limits=limits,
            )
            try:
                outcome = await self._sandbox.run(command, uid, add_note)
                if not outcome.ok:
                    reason = outcome.describe("packing the data", limits)
                    logger.error("data.not_packed", app=data.app_id, reason=reason, last=notes[-1:])
                    raise DataError(f"No snapshot was made: {reason}.")
                _take_file(work / "packed", packed)
            finally:
                await run_in_thread(remove_folder, work)
        if notes:
            logger.warning("data.left_out", app=data.app_id)
        return notes[:MAX_NOTES]

    @asynccontextmanager
    async def unpacked(self, data: AppData, archive: Path, limit: int) -> AsyncIterator[Path]:
        """Unpacks an archive with at most so many bytes. Yields a folder beside the data. Raises DataError."""
        incoming = data.folder / "incoming"
        try:
            await self._unpack(data, archive, incoming, limit)
            yield incoming
        finally:
            await run_in_thread(remove_folder, incoming)

    async def _unpack(self, data: AppData, archive: Path, incoming: Path, limit: int) -> None:
        await run_in_thread(remove_folder, incoming)
        await run_in_thread(incoming.mkdir, mode=0o700)
        limits = SandboxLimits(seconds=UNPACK_SECONDS, memory=512 * MIB, disk=2 * limit + MIB, inodes=MOST_FILES)
        last = deque([""], maxlen=1)
        with ExitStack() as stack:
            uid = await run_in_thread(stack.enter_context, data.user(self._sandbox))
            self._sandbox.give_to_user(incoming, uid)
            command = Command(
                program=ARCHIVES,
                arguments=["unpack", str(MOST_FILES), str(limit)],
                folder=incoming,
                environment=self._sandbox.environment,
                write=[incoming],
                limits=limits,
            )
            with archive.open("rb") as stdin:
                outcome = await self._sandbox.run(command, uid, last.append, stdin=stdin)
        if not outcome.ok:
            reason = last[0] if last[0] and not outcome.why else outcome.describe("unpacking it", limits)
            raise DataError(f"the snapshot can't be restored: {reason}")
        if await run_in_thread(measure_data, incoming) > limit:
            raise DataError(f"the snapshot can't be restored: it has more than the plan's {limit // MIB} MiB")


class DataPacker(Packer):
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


def _take_file(path: Path, target: Path) -> None:
    """Moves a file that a process in the sandbox has written. Raises DataError for anything else."""
    path.rename(target)
    status = target.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise DataError("No snapshot was made.")
    if os.geteuid() == 0:
        os.chown(target, 0, 0, follow_symlinks=False)
    target.chmod(0o600)
