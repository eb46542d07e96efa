"""The copy of an app's public keys in Redis, so that the app's backend is asked by one process and not by each.

The copy holds nothing but public members of keys, and when they were fetched. It is bound to the app, its account, its
way to verify tokens and the address of its keys, and no process uses it for longer than if it had fetched the keys
itself. One process at a time fetches them, under a claim; the others wait for it for a moment.

Failure policy: without Redis, or where the other process takes long, each process fetches for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec

from gateway.errors import BackboneUnavailable
from gateway.inference.auth import scripts
from gateway.redis.client import Store

CLAIM = 6.0  # seconds; a fetch may take five
WAIT = 2.0  # seconds for another process's fetch
LOOK = 0.1  # seconds between two looks meanwhile
PATIENCE = 1.0  # seconds that Redis may take
BYTES = 8_192  # of a document; a larger one is not shared


class Copy(msgspec.Struct, frozen=True):
    fetched_at: float  # monotonic seconds; never later than the backend gave the keys
    digest: bytes  # of the backend's document
    document: bytes


class SharedKeys:
    """Of one app."""

    def __init__(self, store: Store, account: str, app: str, identity: str) -> None:
        self._store, self._account, self._app, self._identity = store, account, app, identity

    async def find(self, oldest: float) -> Copy | None:
        """A copy of at most so many seconds. None: the caller shall fetch the keys."""
        end = time.monotonic() + WAIT
        with contextlib.suppress(BackboneUnavailable, TimeoutError):
            while True:
                sent = time.monotonic()
                async with asyncio.timeout(PATIENCE):
                    found = await scripts.find_key_set(
                        self._store,
                        self._account,
                        self._app,
                        self._identity,
                        oldest=int(oldest * 1000),
                        claim=int(CLAIM * 1000),
                    )
                if found.verdict == "copy":
                    # Redis counts whole milliseconds.
                    return Copy(sent - (found.age + 1) / 1000, bytes.fromhex(found.digest), found.document.encode())
                if found.verdict == "fetch" or sent > end:
                    return None
                await asyncio.sleep(LOOK)
        return None

    async def share(self, document: bytes, digest: bytes, fetched_at: float, life: float) -> None:
        """Shares what was fetched, for `life` seconds since then, unless it is too long; gives the claim back."""
        with contextlib.suppress(BackboneUnavailable, TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await scripts.share_key_set(
                    self._store,
                    self._account,
                    self._app,
                    self._identity,
                    age=int((time.monotonic() - fetched_at) * 1000) + 1,
                    life=int(life * 1000),
                    digest=digest.hex(),
                    document=document.decode() if len(document) <= BYTES else "",
                )

    async def give_up(self) -> None:
        """The fetch has failed: another process may try."""
        await self.share(b"", b"", time.monotonic(), 0)
