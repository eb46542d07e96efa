"""The copies of apps' data in the storage, from which the next host of an app continues.

    data/<app id>/copies/<fence>-<random>.tar.gz     in the storage; the app's claim names the one that counts
    data/<app id>/fence                              on this host: the fence with which it last had the app's claim

A host stores a copy under a new name, and then names it in its claim. That fails if another host has the claim by
then, so what a host stores too late is never used. The next copy removes it.
"""

import asyncio
import secrets
import time
from contextlib import suppress

import msgspec
import structlog

from gateway.cancellation import run_in_thread
from gateway.data.records import FOLDER, SUFFIX
from gateway.errors import StorageUnavailable
from gateway.ids import now_iso
from gateway.storage import Storage
from workers.hosting.claims import Claim, Claims, Copy, StoredClaim
from workers.hosting.data import AppData
from workers.hosting.data_packer import DataPacker
from workers.hosting.packing import DataError
from workers.sandbox.keeper import read_number, write_number

logger = structlog.get_logger()


class HeldClaim:
    """A claim of this host."""

    def __init__(self, stored: StoredClaim) -> None:
        self.stored = stored
        self.has_data = False  # whether this host has the newest data
        self.ready = False  # whether the app may run
        self.task: asyncio.Task[None] | None = None
        self.copied = ""  # the fingerprint of the data that the last copy has
        self.due_at = 0.0  # when the data are compared with the copy again

    @property
    def claim(self) -> Claim:
        return self.stored.claim

    def refresh(self, stored: StoredClaim | None) -> bool:
        """Takes over the claim as it was read last: a write that seemed to fail may have changed it.

        Returns False if this host no longer has it.
        """
        if stored is None or stored.claim.fence != self.claim.fence:
            return False
        self.stored = stored
        return True


class Copies:
    def __init__(self, storage: Storage, claims: Claims, packer: DataPacker, seconds: float) -> None:
        """`seconds` are between two copies."""
        self._storage, self._claims, self._packer, self._seconds = storage, claims, packer, seconds

    # -- to the storage --------------------------------------------------------------------------------------

    async def update(self, held: HeldClaim, data: AppData, *, last: bool = False) -> bool:
        """Stores a copy if the data have changed, and the one before is old enough, or this is the `last` one.

        Returns False if the claim is not as this host knows it. Raises StorageUnavailable, BackboneUnavailable and
        DataError.
        """
        began = time.monotonic()
        if not (last or began >= held.due_at) or not held.has_data or not data.exists:
            return True
        fingerprint, at = await run_in_thread(data.fingerprint), now_iso()
        # Comparing many files takes long. It may use a twentieth of the time, but the copies keep their pace.
        held.due_at = began + min(20 * (time.monotonic() - began), self._seconds)
        if fingerprint == held.copied:
            return True
        claim = held.claim
        name = f"{claim.fence}-{secrets.token_hex(8)}{SUFFIX}"
        try:
            digest = await self._packer.store_copy(data, copy_key(claim.app, name))
        except DataError:  # such as data that take too long to pack
            held.due_at = time.monotonic() + self._seconds
            raise
        claim = msgspec.structs.replace(claim, copy=Copy(name, at, digest))
        if not await self._claims.replace(held.stored, claim):
            return False
        held.stored, held.copied = self._claims.require(claim), fingerprint
        held.due_at = began + self._seconds
        logger.debug("data.copied", app=claim.app, name=name)
        await self._remove_others(claim, name)
        return True

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

    async def fetch(self, held: HeldClaim, data: AppData) -> bool:
        """Makes the data of this host the newest ones. Returns whether they were fetched from the storage.

        The host that had the claim last has the newest data itself. Raises StorageUnavailable and DataError.
        """
        claim, copy, mark = held.claim, held.claim.copy, data.folder / "fence"
        own = read_number(mark) if data.account == claim.account else None
        fetched = copy is not None and own not in (claim.fence, claim.former)
        if fetched and copy is not None:
            await self._packer.fetch_copy(data, claim.account, copy_key(claim.app, copy.name), copy.digest)
        elif copy is None and not data.exists:  # it comes from another engine
            fetched = await self._packer.fetch_newest(data, claim.account)
        data.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        write_number(mark, claim.fence)
        held.has_data = True
        return fetched


def copy_key(app_id: str, name: str) -> str:
    return f"{FOLDER}{app_id}/copies/{name}"


def read_fence(name: str) -> int:
    """Returns the fence in the name of a copy; 0 for other names."""
    fence = name.partition("-")[0]
    return int(fence) if fence.isdigit() else 0
