"""Asks apps' backends about tokens, for apps whose `auth` is of the kind `backend`.

An app has few calls at a time and few requests that wait for one. A backend that could not be reached several times in
a row is left alone for a moment: its app's requests are refused at once, and cost nothing.
"""

from __future__ import annotations

import asyncio
import time

import httpx
import structlog

from gateway.accounts.records import BackendAuth
from gateway.errors import AppBackendUnreachable
from gateway.inference.auth.verification_budget import CALL, Work
from gateway.outbound import addresses
from gateway.outbound import client as outbound
from gateway.outbound.backoff import FIRST_PAUSE, Backoff

logger = structlog.get_logger()

CALLS = 8  # at a time, per app
WAITING = 64  # requests of an app that may wait for a call
CALL_BUDGET = 5.0  # seconds; the wait before it may take as long
ANSWER_BYTES = 262_144
FAILURES = 3  # in a row, after which the backend is left alone


class AppBackend:
    """The backend of one app, called on behalf of its account."""

    def __init__(self, http: outbound.Client, auth: BackendAuth, account: str) -> None:
        self._http, self._auth, self._account = http, auth, account
        self._calls = asyncio.Semaphore(CALLS)
        self._waiting = 0
        # A backend that fails for one token may still work for others, so one failure does not count.
        self._backoff = Backoff(FAILURES)

    async def ask(self, token: str, work: Work) -> outbound.Answer:
        """The backend's answer to a token. Raises AppBackendUnreachable or AppRateLimited."""
        self._check_backoff()
        if self._calls.locked() and self._waiting >= WAITING:
            raise AppBackendUnreachable(retry_after=FIRST_PAUSE)
        self._waiting += 1
        try:
            async with asyncio.timeout(CALL_BUDGET):
                await self._calls.acquire()
        except TimeoutError:
            raise AppBackendUnreachable(retry_after=FIRST_PAUSE) from None
        finally:
            self._waiting -= 1
        try:
            await work.acquire()  # what came before may have used up the app's time
            self._check_backoff()
            work.add(CALL)
            work.pause()
            return await self._call(token)
        finally:
            self._calls.release()

    def _check_backoff(self) -> None:
        if self._backoff.remaining:
            raise AppBackendUnreachable(retry_after=self._backoff.remaining)

    async def _call(self, token: str) -> outbound.Answer:
        began = time.monotonic()
        try:
            answer = await self._http.fetch(
                self._auth.method,
                self._auth.url,
                tenant=self._account,
                headers={"authorization": f"Bearer {token}", "accept": "application/json"},
                budget=CALL_BUDGET,
                max_bytes=ANSWER_BYTES,
            )
        except addresses.CallFailed as error:
            self._backoff.note_failure(time.monotonic() - began)
            logger.warning("backend.failed", host=httpx.URL(self._auth.url).host, error=type(error).__name__)
            raise AppBackendUnreachable(retry_after=max(self._backoff.remaining, FIRST_PAUSE)) from None
        self._backoff.note_success()
        return answer
