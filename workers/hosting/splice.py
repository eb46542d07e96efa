"""The bytes of a WebSocket between a visitor and an app, from the app's answer on.

They pass in both directions as they come, whatever they mean: an app that sends a million frames to its own visitor
costs as much as one that sends the same bytes in an answer. What one side has not taken holds the other one back.
"""

from __future__ import annotations

import asyncio
from typing import Any

from workers.hosting.limits import SLOW_SECONDS

HEAD_BYTES = 65_536  # of the app's answer
CONNECT_SECONDS, HEAD_SECONDS = 5.0, 300.0


class Splice(asyncio.Protocol):
    """The app's side of the connection; and for `aiohttp`, the parser of what the visitor sends."""

    def __init__(self, visitor: Any) -> None:
        """`visitor`: aiohttp's protocol of the visitor's connection."""
        self._loop = asyncio.get_running_loop()
        self._visitor = visitor
        self._app: Any = None
        self._head = bytearray()
        self._answered: asyncio.Future[bytes] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._begun = False
        self._draining: asyncio.Task[None] | None = None  # until the visitor has taken what was sent
        self._timer: asyncio.TimerHandle | None = None  # for the app to take what was sent

    async def ask(self, socket: str, request: bytes) -> bytes:
        """The head of the app's answer, without its blank line. Raises OSError or TimeoutError."""
        async with asyncio.timeout(CONNECT_SECONDS):
            self._app, _ = await self._loop.create_unix_connection(lambda: self, socket)
        self._app.write(request)
        async with asyncio.timeout(HEAD_SECONDS):
            return await self._answered

    async def run(self, answer: bytes) -> None:
        """Sends the visitor `answer`, and passes on bytes until one side closes."""
        self._begun = True
        self._visitor.transport.write(answer)
        self._visitor.set_parser(self)
        self._app.resume_reading()
        if self._head:
            self.data_received(bytes(self._head))
        await self._ended

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._draining is not None:
            self._draining.cancel()
        if self._app is not None:
            self._app.close()
        if (transport := self._visitor.transport) is not None:  # which closes when the visitor has taken the rest
            self._loop.call_later(SLOW_SECONDS, transport.abort)

    # -- what the app sends ----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            self._read_head(data)
            return
        if (transport := self._visitor.transport) is None:
            self._app.abort()
            return
        transport.write(data)
        if self._visitor.writing_paused and self._draining is None:
            self._app.pause_reading()
            self._draining = self._loop.create_task(self._drain())

    def _read_head(self, data: bytes) -> None:
        self._head += data
        if self._answered.done():  # bytes behind it, which wait for `run`
            if len(self._head) > HEAD_BYTES:
                self._app.pause_reading()
            return
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if end:
            self._head = rest
            self._answered.set_result(bytes(head))
        elif len(self._head) > HEAD_BYTES:
            self._app.abort()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(SLOW_SECONDS):
                await self._visitor._drain_helper()
        except (OSError, TimeoutError):
            self._app.abort()
            if (transport := self._visitor.transport) is not None:
                transport.abort()
        else:
            self._app.resume_reading()
        finally:
            self._draining = None

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._answered.done():
            self._answered.set_exception(ConnectionResetError("the app closed the connection"))
        if not self._ended.done():
            self._ended.set_result(None)

    def pause_writing(self) -> None:
        """The app does not take what the visitor sent."""
        self._visitor.pause_reading()
        self._timer = self._loop.call_later(SLOW_SECONDS, self._app.abort)

    def resume_writing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._visitor.resume_reading()

    # -- what the visitor sends ------------------------------------------------------------------------------

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._app.write(data)
        return False, b""

    def feed_eof(self) -> None:
        self._app.close()
