"""Limits what one app takes of the server that all apps share: requests in progress, requests that wait, and patience
with slow visitors.

An app has `APP_REQUESTS` requests in progress at once. The next `APP_WAITING` wait, in order and at most `WAIT_SECONDS`
long; all others are refused at once. Together the apps have `total` requests in progress. When they are used up, an app
gets another one only while it has fewer than `GUARANTEED`, so that apps that fill the server do not keep others out.
"""

from __future__ import annotations

import asyncio
import resource
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

APP_REQUESTS = 384
APP_WAITING = 128
WAIT_SECONDS = 5.0
GUARANTEED = 16
DESCRIPTORS = 4  # of a request: the visitor, the app, a file, and one to spare

SLOW_SECONDS = 60.0  # that a visitor may keep the server waiting for a body or with an answer, without any progress
SLOW_BYTES = 1_024  # for which a visitor gets one second more, up to `SLOW_SECONDS`


MOST_FILES = 65_536  # that are counted on where the machine sets no limit


def open_files(*, hard: bool = False) -> int:
    """Returns the number of files that this process may open or, with `hard`, may allow itself and its children."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[hard]
    return MOST_FILES if limit == resource.RLIM_INFINITY else min(limit, MOST_FILES)


class Busy(Exception):
    """The app has too many requests in progress."""


class RequestLimits:
    def __init__(self, total: int = 0) -> None:
        """`total`: requests in progress of all apps; 0: what the process has descriptors for."""
        self._total = total or open_files() // DESCRIPTORS
        self._in_progress: dict[str, int] = {}
        self._sum = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def take(self, app_id: str) -> AsyncIterator[None]:
        """Raises Busy when the app's requests are used up and none ends in time."""
        if self._waiting.get(app_id) or not self._has_room(app_id):
            await self._wait(app_id)
        else:
            self._add(app_id, 1)
        try:
            yield
        finally:
            self._add(app_id, -1)
            self._admit(app_id)

    def _has_room(self, app_id: str) -> bool:
        count = self._in_progress.get(app_id, 0)
        return count < GUARANTEED or (count < APP_REQUESTS and self._sum < self._total)

    def _add(self, app_id: str, change: int) -> None:
        self._sum += change
        if count := self._in_progress.get(app_id, 0) + change:
            self._in_progress[app_id] = count
        else:
            self._in_progress.pop(app_id)

    async def _wait(self, app_id: str) -> None:
        """Returns once the request has been counted."""
        waiting = self._waiting.setdefault(app_id, deque())
        if len(waiting) >= APP_WAITING:
            raise Busy
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.cancelled():
                self._leave(app_id, turn)
            else:  # it was admitted in the same moment
                self._add(app_id, -1)
                self._admit(app_id)
            if isinstance(error, TimeoutError):
                raise Busy from None
            raise

    def _leave(self, app_id: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(app_id, deque())
        with suppress(ValueError):
            waiting.remove(turn)
        if not waiting:
            self._waiting.pop(app_id, None)

    def _admit(self, app_id: str) -> None:
        """Lets the app's first waiting request begin. A request of the same app has just ended."""
        waiting = self._waiting.get(app_id)
        while waiting and self._has_room(app_id):
            turn = waiting.popleft()
            if not turn.done():
                self._add(app_id, 1)
                turn.set_result(None)
        if not waiting:
            self._waiting.pop(app_id, None)


class Patience:
    """The time that one visitor may still keep the server waiting."""

    def __init__(self) -> None:
        self._left = SLOW_SECONDS
        self.exhausted = False

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """For one read or write. Raises TimeoutError when the visitor is too slow."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._left):
                yield
        except TimeoutError:
            self.exhausted = True
            raise
        self._left -= loop.time() - began

    def earn(self, size: int) -> None:
        """Adds time for bytes that got through."""
        self._left = min(self._left + size / SLOW_BYTES, SLOW_SECONDS)
