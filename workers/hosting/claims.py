"""The claims on apps with data, where several hosts serve from one storage. One host at a time has an app's claim.

A claim names a host and its session (`leases.py`). It is free when the host has given it up, or when the session has
ended. Each new claim has a higher fence. The claim also names the copy of the data in the storage. A host changes a
claim only if it is as this host knows it, so a host whose claim was taken over cannot name another copy.
"""

import asyncio
import time
from typing import NamedTuple

import msgspec
import structlog

from gateway.deploys import scripts
from gateway.errors import BackboneUnavailable
from gateway.ids import Time
from gateway.keys import claims_key, partition_tag
from gateway.redis.client import Store

logger = structlog.get_logger()

VERSION = "version"  # the field that changes with each change of a partition's claims


class Copy(msgspec.Struct, frozen=True):
    """A copy of an app's data in the storage."""

    name: str  # begins with the fence of the claim with which it was stored
    at: Time
    digest: str  # SHA-256, hexadecimal


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    account: str
    app: str  # id
    host: str
    session: str  # of the host; empty: the host has given up the claim
    fence: int
    former: int = 0  # the fence of the claim before; the host that had it may have newer data than the storage
    died: bool = False  # whether the host of the claim before did not give it up
    copy: Copy | None = None


class StoredClaim(NamedTuple):
    text: str  # as it is stored, to compare it when it is changed
    claim: Claim


class Claims:
    """The claims of all hosts, as they were read last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._versions: dict[str, str] = {}  # by tag of the partition
        self._known: dict[tuple[str, str], StoredClaim] = {}  # by tag and app
        self._lock = asyncio.Lock()  # what is read must not be older than what this host has written meanwhile

    def find(self, account: str, app_id: str) -> StoredClaim | None:
        return self._known.get((partition_tag(account), app_id))

    def require(self, claim: Claim) -> StoredClaim:
        """Returns a claim that was just written, as it is stored."""
        return self._known[partition_tag(claim.account), claim.app]

    def list_all(self) -> list[StoredClaim]:
        return [*self._known.values()]

    async def read_changes(self) -> None:
        """Reads the claims of the partitions in which one has changed. Raises BackboneUnavailable."""
        async with self._lock:
            async for tag, found in self._store.read_changed(claims_key, VERSION, self._versions):
                self._known = {key: stored for key, stored in self._known.items() if key[0] != tag}
                for app, text in found.items():
                    try:
                        self._known[tag, app] = StoredClaim(text, msgspec.json.decode(text, type=Claim))
                    except msgspec.MsgspecError as error:  # it must not affect the others
                        logger.error("claims.unreadable", app=app, error=str(error))

    async def replace(self, before: StoredClaim | None, after: Claim) -> bool:
        """Replaces the claim `before`. Returns False if it has changed. Raises BackboneUnavailable."""
        text = msgspec.json.encode(after).decode()
        async with self._lock:
            if not await self._set(after.account, after.app, before, text):
                return False
            self._known[partition_tag(after.account), after.app] = StoredClaim(text, after)
            return True

    async def remove(self, stored: StoredClaim) -> bool:
        """Removes the claim on an app that no longer exists. Raises BackboneUnavailable."""
        claim = stored.claim
        async with self._lock:
            removed = await self._set(claim.account, claim.app, stored, "")
            if removed:
                self._known.pop((partition_tag(claim.account), claim.app), None)
            return removed

    async def _set(self, account: str, app: str, before: StoredClaim | None, text: str) -> bool:
        try:
            return await scripts.set_claim(self._store, account, app, before.text if before else "", text)
        except BackboneUnavailable:  # it may have been written, so what is known may be wrong
            self._versions.pop(partition_tag(account), None)
            raise


def make_claim(account: str, app: str, host: str, session: str, former: Claim | None) -> Claim:
    """Makes the claim that follows `former`. Its fence grows even if Redis has lost the claims."""
    fence = max(time.time_ns() // 1_000_000, former.fence + 1 if former else 0)
    if former is None or former.account != account:
        return Claim(account, app, host, session, fence)
    return Claim(account, app, host, session, fence, former.fence, bool(former.session), former.copy)
