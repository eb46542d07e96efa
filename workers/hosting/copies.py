"""The copies of apps' data in the storage, from which the next host of an app continues.

    data/<app id>/copies/<fence>-<number>.tar.gz     in the storage; the app's claim names the one that counts
    data/<app id>/fence                              on this host: the fence with which it last had the app's claim

A host stores a copy under a new name, and then names it in its claim. That fails if another host has the claim by
then, so what a host stores too late is never used. The next copy removes it.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Protocol

import msgspec
import structlog

from gateway.data.records import FOLDER, SUFFIX
from gateway.errors import StorageUnavailable
from gateway.ids import now_iso
from gateway.storage import Storage
from workers.hosting.claims import Claim, Claims, Copy, StoredClaim
from workers.hosting.data import AppData
from workers.hosting.serving import run_in_thread

logger = structlog.get_logger()


class Packer(Protocol):
    """Packs and unpacks the data of this host's apps (`data_agent.py`). Each method raises StorageUnavailable."""

    async def store_copy(self, data: AppData, key: str) -> str:
        """Packs the data into an object of the storage. Returns its SHA-256. Raises DataError."""

    async def fetch_copy(self, data: AppData, account: str, key: str, digest: str) -> None:
        """Replaces the data by those of an object of the storage. Raises DataError."""


class HeldClaim:
    """A claim of this host."""

    def __init__(self, stored: StoredClaim) -> None:
        self.stored = stored
        self.ready = False  # whether the data are here, so that the app may run
        self.task: asyncio.Task[None] | None = None
        self.copied = ""  # the fingerprint of the data that the last copy has
        self.copied_at = float("-inf")
        self.copies = 0
        self.copying = asyncio.Lock()

    @property
    def claim(self) -> Claim:
        return self.stored.claim


class Copies:
    def __init__(self, storage: Storage, claims: Claims, packer: Packer, seconds: float) -> None:
        """`seconds` are between two copies."""
        self._storage, self._claims, self._packer, self._seconds = storage, claims, packer, seconds

    # -- to the storage --------------------------------------------------------------------------------------

    async def update(self, held: HeldClaim, data: AppData, *, last: bool = False) -> None:
        """Stores a copy if the data have changed, and the one before is old enough, or this is the `last` one.

        Raises StorageUnavailable, BackboneUnavailable and DataError.
        """
        async with held.copying:
            due = last or time.monotonic() - held.copied_at >= self._seconds
            if not due or not data.exists:
                return
            fingerprint, at = await run_in_thread(data.fingerprint), now_iso()
            if fingerprint == held.copied:
                return
            began, claim = time.monotonic(), held.claim
            held.copies += 1
            # The time makes the name unique after a restart of the worker.
            name = make_name(claim.fence, time.time_ns() // 1_000_000, held.copies)
            digest = await self._packer.store_copy(data, copy_key(claim.app, name))
            claim = msgspec.structs.replace(claim, copy=Copy(name, at, digest))
            if await self._claims.replace(held.stored, claim):
                held.stored, held.copied, held.copied_at = self._claims.require(claim), fingerprint, began
                logger.debug("data.copied", app=claim.app, name=name)
                await self._remove_others(claim, name)

    async def _remove_others(self, claim: Claim, kept: str) -> None:
        """Removes the copies that no claim names any more. Those with a higher fence belong to the next host."""
        with suppress(StorageUnavailable):  # the next copy removes them
            folder = f"{FOLDER}{claim.app}/copies/"
            names = [name for name in await self._storage.list_names(folder) if name != kept]
            await self._storage.delete([f"{folder}{name}" for name in names if read_fence(name) <= claim.fence])

    async def remove_all(self, claim: Claim) -> None:
        """Removes all copies of a deleted app. Raises StorageUnavailable."""
        await self._storage.delete_folder(f"{FOLDER}{claim.app}/copies")

    # -- from the storage ------------------------------------------------------------------------------------

    async def fetch(self, claim: Claim, data: AppData) -> bool:
        """Makes the data of this host the newest ones. Returns whether they were fetched from the storage.

        The host that had the claim last has the newest data itself. Raises StorageUnavailable and DataError.
        """
        mark = data.folder / "fence"
        own = int(mark.read_text()) if mark.exists() and data.account == claim.account else 0
        if own == claim.fence:
            return False
        copy = claim.copy
        fetched = copy is not None and own != claim.former
        if fetched and copy is not None:
            await self._packer.fetch_copy(data, claim.account, copy_key(claim.app, copy.name), copy.digest)
        data.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        fresh = mark.with_suffix(".new")
        fresh.write_text(str(claim.fence))
        fresh.replace(mark)
        return fetched


def copy_key(app_id: str, name: str) -> str:
    return f"{FOLDER}{app_id}/copies/{name}"


def make_name(fence: int, milliseconds: int, number: int) -> str:
    return f"{fence}-{milliseconds}-{number}{SUFFIX}"


def read_fence(name: str) -> int:
    """Returns the fence in the name of a copy; 0 for other names."""
    fence = name.partition("-")[0]
    return int(fence) if fence.isdigit() else 0
