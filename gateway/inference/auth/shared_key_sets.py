"""Shares an app's public keys among processes through a copy in Redis, so that only one process fetches them.

The copy holds only public members of keys, and a time of Redis before the fetch. It is bound to the app, its account,
its `auth` and the address of its keys. No process uses it for longer than keys that it fetched itself. One process at
a time fetches the keys, while the others wait for a moment.

Failure policy: without Redis, or if the other process takes long, each process fetches the keys itself.
"""

import asyncio
import contextlib
import time

import msgspec

from gateway.errors import BackboneUnavailable
from gateway.inference.auth import scripts
from gateway.loops import until
from gateway.redis.client import Store

FETCH_SECONDS = 6.0  # a fetch may take five
WAIT_SECONDS = 2.0  # for another process's fetch
POLL_SECONDS = 0.1  # between two checks while waiting for it
REDIS_SECONDS = 1.0  # that a call of Redis may take
MAX_BYTES = 8_192  # of a document; a larger one is not shared


class KeySetCopy(msgspec.Struct, frozen=True):
    fetched_at: float  # monotonic seconds; never later than the backend sent the keys
    digest: bytes  # of the backend's document
    document: bytes


class SharedKeys:
    """The shared keys of one app."""

    def __init__(self, store: Store, account: str, app: str, identity: str) -> None:
        self._store, self._account, self._app, self._identity = store, account, app, identity
        self.checked_at = 0  # Redis's time (ms) when it was last asked for a copy; 0 if it did not answer

    async def find(self, oldest: float) -> KeySetCopy | None:
        """Returns a copy that is at most `oldest` seconds old, or None if the caller has to fetch the keys."""
        self.checked_at, sent = 0, 0.0

        async def look() -> scripts.FoundKeySet | None:
            """Returns None while another process fetches the keys."""
            nonlocal sent
            sent = time.monotonic()
            async with asyncio.timeout(REDIS_SECONDS):
                found = await scripts.find_key_set(
                    self._store,
                    self._account,
                    self._app,
                    self._identity,
                    oldest=int(oldest * 1000),
                    held_for=int(FETCH_SECONDS * 1000),
                )
            self.checked_at = found.now
            return None if found.verdict == "wait" else found

        with contextlib.suppress(BackboneUnavailable, TimeoutError):
            found = await until(look, POLL_SECONDS, WAIT_SECONDS)
            if found is not None and found.verdict == "copy":
                # Redis counts whole milliseconds.
                return KeySetCopy(sent - (found.age + 1) / 1000, bytes.fromhex(found.digest), found.document.encode())
        return None

    async def share(self, document: bytes, digest: bytes, checked_at: int, life: float) -> None:
        """Shares keys that were fetched after `checked_at`, unless they are too large, and lets others fetch again.

        They are shared for `life` seconds from then, in Redis's time: how long Redis takes to answer does not matter.
        """
        with contextlib.suppress(BackboneUnavailable, TimeoutError):
            async with asyncio.timeout(REDIS_SECONDS):
                await scripts.share_key_set(
                    self._store,
                    self._account,
                    self._app,
                    self._identity,
                    at=checked_at,
                    life=int(life * 1000),
                    digest=digest.hex(),
                    document=document.decode() if len(document) <= MAX_BYTES else "",
                )

    async def give_up(self) -> None:
        """Lets another process fetch after a failed attempt."""
        await self.share(b"", b"", 0, 0)
