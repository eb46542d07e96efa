"""Fetches the public keys that verify the tokens of apps' users.

A key set is refreshed in the background after five minutes. While the backend is down it stays usable for an hour;
after that, the app's requests are refused. Fetches are limited in rate, and to one at a time per app. Before a process
fetches keys from the backend, it checks Redis for another process's copy (`shared_key_sets.py`). The age of keys counts
from when the backend sent them, to whichever process.
"""

import asyncio
import hashlib
import time
from collections.abc import Coroutine

import httpx
import structlog

from gateway.accounts.jose.jwk import ALGORITHMS, PublicKey, find_keys, public_part, read_document, read_key
from gateway.errors import AppBackendUnreachable, TokenFault
from gateway.inference.auth.shared_key_sets import SharedKeys
from gateway.outbound import addresses
from gateway.outbound import client as outbound
from gateway.outbound.backoff import FIRST_PAUSE_SECONDS, Backoff

logger = structlog.get_logger()

REFRESH_SECONDS = 300.0  # after which keys are fetched again in the background
KEYS_SECONDS = 3_600.0  # that keys stay usable while their backend is down
FETCH_INTERVAL_SECONDS = 10.0  # between fetches while there are usable keys
FETCH_SECONDS = 5.0  # that a fetch may take
FETCH_BYTES = 262_144
MAX_WAITING = 500  # requests of an app that wait for a fetch


class BadStatus(ValueError):
    """The backend answered a request for its keys with another status than 200."""


class KeySet:
    """The keys of one app's backend, fetched on behalf of its account."""

    def __init__(
        self,
        http: outbound.Client,
        url: str,
        account: str,
        shared: SharedKeys | None = None,
        *,
        fetch_interval: float = FETCH_INTERVAL_SECONDS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`fetch_interval`: seconds between fetches while there are usable keys. `max_waiting`: requests."""
        self._fetch_interval, self._max_waiting = fetch_interval, max_waiting
        self._http, self._url, self.account, self._shared = http, url, account, shared
        self._keys: list[PublicKey] = []
        self.digest = b""  # SHA-256 of the keys' document
        self._fetched_at = float("-inf")
        self._tried_at = float("-inf")
        self._refetched_at = float("-inf")  # for a key that was missing
        self._copied = False  # whether another process fetched the keys
        self._backoff = Backoff()
        self._fault: TokenFault = "backend-unreachable"  # of the last fetch that failed
        self._fetch_task: asyncio.Task[None] | None = None
        self._sharing: asyncio.Task[None] | None = None  # a reference, so that it is not collected while it runs
        self._waiting = 0

    @property
    def size(self) -> int:
        """The number of keys."""
        return len(self._keys)

    @property
    def fresh_until(self) -> float:
        """The monotonic time from which the next use fetches the keys again."""
        return self._fetched_at + REFRESH_SECONDS

    def find(self, kid: str | None, alg: str) -> list[PublicKey] | None:
        """Returns at most `MAX_TRIED` keys that may have signed a token, or None if the caller has to `fetch` first.

        An unknown `kid` needs a fetch, unless the last one for such a `kid` was just now. Raises AppBackendUnreachable.
        """
        age = time.monotonic() - self._fetched_at
        if age > REFRESH_SECONDS:
            fetching = self._start_fetch(self._fetch_interval if age <= KEYS_SECONDS else 0)
            if age > KEYS_SECONDS:
                if fetching:
                    return None
                raise AppBackendUnreachable(retry_after=self._backoff.remaining, reason=self._fault)
        keys = find_keys(self._keys, kid, alg)
        if not keys and kid is not None and self._start_refetch():
            return None
        return keys

    async def fetch(self, kid: str | None, alg: str) -> list[PublicKey]:
        """Waits for the running fetch, and returns the keys that may have signed the token.

        Raises AppBackendUnreachable.
        """
        await self._wait_for_fetch()
        if time.monotonic() - self._fetched_at > KEYS_SECONDS:
            wait = max(self._backoff.remaining, FIRST_PAUSE_SECONDS)
            raise AppBackendUnreachable(retry_after=wait, reason=self._fault)
        keys = find_keys(self._keys, kid, alg)
        if not keys and kid is not None and self._copied and self._start_refetch():
            # The copy may be older than this key.
            await self._wait_for_fetch()
            keys = find_keys(self._keys, kid, alg)
        return keys

    async def fetch_newer(self, kid: str | None, alg: str, digest: bytes, since: float) -> list[PublicKey]:
        """Returns the keys that may have signed a token if no key of the set with this digest has.

        Returns nothing if that set is still the newest, or was fetched after `since` (monotonic), when the token came.

        A backend may replace a key under its `kid`, so a wrong signature needs a fetch like an unknown `kid`, and
        shares its limits. Raises AppBackendUnreachable.
        """
        if digest == self.digest and self._fetched_at < since and self._start_refetch():
            await self._wait_for_fetch()
        return [] if digest == self.digest else find_keys(self._keys, kid, alg)

    async def _wait_for_fetch(self) -> None:
        """Raises AppBackendUnreachable if too many wait."""
        if self._waiting >= self._max_waiting:
            raise AppBackendUnreachable(retry_after=FIRST_PAUSE_SECONDS)
        if self._fetch_task is not None:
            self._waiting += 1
            try:
                await asyncio.shield(self._fetch_task)
            finally:
                self._waiting -= 1

    def explain_missing(self, kid: str | None, alg: str) -> TokenFault:
        """Returns why no key may have signed a token with this header."""
        if not self._keys:
            return "keys-unreadable"
        if alg not in ALGORITHMS or kid is None or any(key.kid in (None, kid) for key in self._keys):
            return "algorithm"
        return "unknown-key"

    def _start_fetch(self, interval: float) -> bool:
        """Starts a fetch, unless the last one began less than `interval` seconds ago or has just failed.

        Returns whether a fetch is running.
        """
        if self._fetch_task is None:
            if time.monotonic() - self._tried_at < interval or self._backoff.remaining:
                return False
            self._tried_at = time.monotonic()
            self._fetch_task = asyncio.create_task(self._fetch())
        return True

    def _start_refetch(self) -> bool:
        """Starts a fetch for a key that is missing, unless the last one for such a key began just now.

        The first fetch of all does not count: the backend may have replaced its keys since. Returns whether a fetch is
        running.
        """
        if self._fetch_task is None:
            if time.monotonic() - self._refetched_at < self._fetch_interval or not self._start_fetch(0):
                return False
            self._refetched_at = time.monotonic()
        return True

    async def _fetch(self) -> None:
        try:
            if not await self._take_copy():
                await self._fetch_from_backend()
            self._backoff.note_success()
        except (addresses.CallFailed, ValueError, RecursionError) as error:
            self._fault = fault_of(error)
            self._backoff.note_failure(time.monotonic() - self._tried_at)
            logger.warning("jwks.failed", host=httpx.URL(self._url).host, error=type(error).__name__)
            if self._shared is not None:
                self._share(self._shared.give_up())
        finally:
            self._fetch_task = None

    async def _take_copy(self) -> bool:
        """Uses another process's keys if they are newer than these, and new enough. Raises ValueError."""
        if self._shared is None:
            return False
        # Fresh keys are fetched again only if a key is missing, which may be newer than an older copy.
        fresh = time.monotonic() < self.fresh_until
        copy = await self._shared.find(self._fetch_interval if fresh else REFRESH_SECONDS)
        if copy is None or copy.fetched_at <= self._fetched_at:
            return False
        await self._use(copy.document, copy.digest)
        self._fetched_at = self._tried_at = copy.fetched_at
        self._refetched_at = min(self._refetched_at, copy.fetched_at)
        self._copied = True
        return True

    async def _fetch_from_backend(self) -> None:
        """Raises CallFailed or ValueError."""
        checked_at = self._shared.checked_at if self._shared is not None else 0
        document = await fetch_document(self._http, self._url, self.account)
        digest = hashlib.sha256(document).digest()
        await self._use(document, digest)
        self._fetched_at, self._copied = time.monotonic(), False
        if self._shared is not None:
            self._share(_share_public(self._shared, document, digest, checked_at))

    def _share(self, sharing: Coroutine[None, None, None]) -> None:
        """Shares keys in the background: requests that wait for the keys do not wait for Redis."""
        self._sharing = asyncio.create_task(sharing)

    async def _use(self, document: bytes, digest: bytes) -> None:
        if digest != self.digest:
            self._keys, self.digest = await read_document(document, read_key), digest


def fault_of(error: Exception) -> TokenFault:
    """Returns what the failed fetch of a key set says about its backend."""
    if isinstance(error, BadStatus):
        return "backend-status"
    if isinstance(error, addresses.CallFailed) and error.reason not in ("too-large", "encoded"):
        return "backend-unreachable"
    return "keys-unreadable"


async def fetch_document(http: outbound.Client, url: str, account: str) -> bytes:
    """Returns what the backend answers to a request for its keys. Raises CallFailed or BadStatus."""
    answer = await http.fetch(
        "GET",
        url,
        tenant=account,
        headers={"accept": "application/json"},
        budget=FETCH_SECONDS,
        max_bytes=FETCH_BYTES,
    )
    if answer.status != 200:
        raise BadStatus(f"status {answer.status}")
    return answer.body


async def _share_public(shared: SharedKeys, body: bytes, digest: bytes, checked_at: int) -> None:
    """Shares only the public members of a document's keys."""
    parts = await read_document(body, public_part)
    await shared.share(b'{"keys":[%b]}' % b",".join(parts), digest, checked_at, REFRESH_SECONDS)
