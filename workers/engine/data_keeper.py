"""Keeps the data of one app: measures, packs and replaces them. The app stops while they are replaced.

A `Keeper` is a `DataKeeper` of their folder, or the client of a pod that has one (`workers/kubernetes/data_pod.py`).

Files are handed over in a context, which yields them packed. It takes effect when it is left without an error: the
files are replaced, or removed, or a daily snapshot counts as made. So the caller first stores what it got. Until then
the files stay as they are, whatever fails or is killed.
"""

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from gateway.cancellation import run_in_thread
from workers.engine.app_data import AppData, is_empty
from workers.engine.daily import DailySnapshots
from workers.engine.packing import NOT_STOPPED, DataError, SandboxPacker
from workers.engine.replacements import Replacements
from workers.sandbox.removal import remove_folder


class DataReport(msgspec.Struct, frozen=True):
    used: int  # bytes
    full: bool
    held: bool  # nothing of the app runs
    stale: bool  # nothing runs until the newest snapshot has come and `begin` is called
    replacements: list[str]  # the changes that have replaced the files
    daily: bool = True  # whether a daily snapshot may be due; pods of an earlier version do not say it


class Packed(msgspec.Struct, frozen=True):
    archive: Path
    notes: list[str]  # what it lacks


Handover = AbstractAsyncContextManager[Packed | None]  # None: there are no files


class Keeper(Protocol):
    """All methods can be repeated, except for those with a `change`: `report` tells which changes were made.

    They raise DataError.
    """

    async def report(self, limit: int | None = None) -> DataReport:
        """Sets the limit, if one is given."""

    def snapshot(self) -> Handover:
        """Hands over the files."""

    def daily(self) -> Handover:
        """Hands over the files if a daily snapshot is due, and something has changed."""

    def restore(self, archive: Path, change: str, limit: int) -> Handover:
        """Hands over the files, and replaces them by those of the archive."""

    def clear(self, change: str) -> Handover:
        """Hands over the files, and removes them. The app starts with an empty folder."""

    async def undo(self, change: str) -> None:
        """Brings back the files from before a restore."""

    async def confirm(self, change: str) -> None:
        """Removes the files from before a restore."""

    async def begin(self, snapshot_id: str) -> None:
        """Lets the app run on files that were stale. They come from this snapshot, if any."""


class DataKeeper:
    """Keeps the data in a folder. Implements `Keeper`."""

    def __init__(self, data: AppData, packer: SandboxPacker) -> None:
        self._data, self._packer = data, packer
        self._replacements, self._daily = Replacements(data), DailySnapshots(data)

    async def report(self, limit: int | None = None) -> DataReport:
        data = self._data
        if limit is not None:
            data.limit = limit
        due = self._daily.is_due(time.time())
        return DataReport(data.used, data.is_full, data.is_held, data.is_stale, self._replacements.changes, due)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Packed | None]:
        async with self._packed(self._data.files) as packed:
            yield packed

    @asynccontextmanager
    async def daily(self) -> AsyncIterator[Packed | None]:
        await run_in_thread(self._data.remove_leftovers)
        now = time.time()
        if not (fingerprint := await run_in_thread(self._daily.find_change, now)):
            yield None
            return
        async with self._packed(self._data.files) as packed:
            yield packed
        self._daily.note(now, fingerprint)

    @asynccontextmanager
    async def restore(self, archive: Path, change: str, limit: int) -> AsyncIterator[Packed | None]:
        async with AsyncExitStack() as stack:
            incoming = await stack.enter_async_context(self._packer.unpacked(self._data, archive, limit))
            await stack.enter_async_context(_stopped(self._data))
            # A newer snapshot is kept than stale files.
            packed = None if self._data.is_stale else await stack.enter_async_context(self._packed(self._data.files))
            yield packed
            await run_in_thread(self._replacements.replace, incoming, change)

    @asynccontextmanager
    async def clear(self, change: str) -> AsyncIterator[Packed | None]:
        if await run_in_thread(is_empty, self._data.files):
            yield None
            return
        async with _stopped(self._data), self._packed(self._data.files) as packed:
            yield packed
            await run_in_thread(self._replacements.clear, change)

    async def undo(self, change: str) -> None:
        if change in self._replacements.changes:
            async with _stopped(self._data):
                await run_in_thread(self._replacements.undo, change)

    async def confirm(self, change: str) -> None:
        await run_in_thread(self._replacements.confirm, change)

    async def begin(self, snapshot_id: str) -> None:
        if snapshot_id:
            self._data.note_snapshot(snapshot_id)
        self._data.unmark_stale()

    @asynccontextmanager
    async def forget(self, account: str) -> AsyncIterator[Packed | None]:
        """Hands over the files of an account whose app is deleted, and removes them."""
        async with _stopped(self._data):
            files = await run_in_thread(self._data.set_aside, account)
            async with self._packed(files) as packed:
                yield packed
            await run_in_thread(remove_folder, files)

    async def remove(self) -> None:
        """Removes the files."""
        async with _stopped(self._data):
            await run_in_thread(self._data.remove)

    @asynccontextmanager
    async def _packed(self, files: Path) -> AsyncIterator[Packed | None]:
        if await run_in_thread(is_empty, files):
            yield None
        else:
            async with self._packer.packed(self._data, files) as (archive, notes):
                yield Packed(archive, notes)


@asynccontextmanager
async def _stopped(data: AppData) -> AsyncIterator[None]:
    """Stops the processes of the app, and starts none within the context. Raises DataError."""
    with ExitStack() as stack:
        try:
            await run_in_thread(stack.enter_context, data.stopped())
        except TimeoutError:
            raise DataError(NOT_STOPPED, service_fault=True) from None
        yield
