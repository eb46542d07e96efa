"""Calls apps' backends to verify tokens, for apps whose `auth` has the kind `backend`.

Each app may make few calls at a time, and few of its requests may wait for one. After several failed calls in a row, a
backend gets no calls for a moment: its app's requests are refused immediately and cost nothing.
"""

import asyncio
import time

import httpx
import structlog

from gateway.accounts.records import BackendAuth
from gateway.errors import AppBackendUnreachable
from gateway.inference.auth.verification_budget import BACKEND_CALL_SECONDS, Verification
from gateway.outbound import addresses
from gateway.outbound import client as outbound
from gateway.outbound.backoff import FIRST_PAUSE_SECONDS, Backoff

logger = structlog.get_logger()

MAX_CALLS = 8  # at a time, per app
MAX_WAITING = 64  # requests of an app that wait for a call
CALL_SECONDS = 5.0  # for a call; the wait before it may take as long
ANSWER_BYTES = 262_144
FAILURES = 3  # in a row, after which the backend gets no calls for a moment


class AppBackend:
    """The backend of one app, called on behalf of its account."""

    def __init__(self, http: outbound.Client, auth: BackendAuth, account: str) -> None:
        self._http, self._auth, self._account = http, auth, account
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._waiting = 0
        # One failure alone does not count: the backend may still work for other tokens.
        self._backoff = Backoff(FAILURES)

    async def send_token(self, token: str, verification: Verification) -> outbound.Response:
        """Returns the backend's answer to a token. Raises AppBackendUnreachable or TokensLimited."""
        self._check_backoff()
        if self._calls.locked() and self._waiting >= MAX_WAITING:
            raise AppBackendUnreachable(retry_after=FIRST_PAUSE_SECONDS)
        self._waiting += 1
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._calls.acquire()
        except TimeoutError:
            raise AppBackendUnreachable(retry_after=FIRST_PAUSE_SECONDS) from None
        finally:
            self._waiting -= 1
        try:
            await verification.acquire()  # earlier tokens may have used up the app's time
            self._check_backoff()
            verification.charge(BACKEND_CALL_SECONDS)
            verification.pause()
            return await self._call(token)
        finally:
            self._calls.release()

    def _check_backoff(self) -> None:
        if self._backoff.remaining:
            raise AppBackendUnreachable(retry_after=self._backoff.remaining)

    async def _call(self, token: str) -> outbound.Response:
        began = time.monotonic()
        try:
            answer = await self._http.fetch(
                self._auth.method,
                self._auth.url,
                tenant=self._account,
                headers={"authorization": f"Bearer {token}", "accept": "application/json"},
                budget=CALL_SECONDS,
                max_bytes=ANSWER_BYTES,
            )
        except addresses.CallFailed as error:
            self._backoff.note_failure(time.monotonic() - began)
            logger.warning("backend.failed", host=httpx.URL(self._auth.url).host, error=type(error).__name__)
            raise AppBackendUnreachable(retry_after=max(self._backoff.remaining, FIRST_PAUSE_SECONDS)) from None
        self._backoff.note_success()
        return answer
