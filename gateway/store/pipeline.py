"""The token path's connection to Redis: the scripts of all requests share it.

What is called in one turn of the loop leaves in one write; the answers come in the order of the calls. No call has a
timer of its own: one look a quarter of a second ends the connection, and every call on it, once the oldest has waited
too long. A call is sent once: whether a call whose answer was lost has run is for its caller to think about.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.asyncio.connection import parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

CALLS = 20_000  # that may wait for their answer
LOOK = 0.25  # seconds


class _Link(asyncio.Protocol):
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(encoding="utf-8", errors="replace")
        self._out: list[bytes] = []
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._moving = True  # an answer has come since the last look, or nothing waits
        self.closed = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports only look like asyncio's

    def call(self, command: bytes) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self.closed or len(self._waiting) >= CALLS:
            answer.set_exception(RedisConnectionError("the connection is lost, or too much waits for it"))
            return answer
        if not self._waiting:
            self._moving = True
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(command)
        self._waiting.append(answer)
        return answer

    def _flush(self) -> None:
        commands, self._out = self._out, []
        if not self.closed:
            self._transport.write(b"".join(commands))

    def data_received(self, data: bytes) -> None:
        self._moving = True
        reader, waiting = self._reader, self._waiting
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                answer = waiting.popleft()
                if answer.done():  # whoever called has gone
                    continue
                if isinstance(reply, hiredis.ReplyError):
                    answer.set_exception(ResponseError(str(reply)))
                else:
                    answer.set_result(reply)
        except (hiredis.ProtocolError, IndexError):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(RedisConnectionError("the connection is lost"))

    def look(self) -> bool:
        """False when calls wait and nothing has come since the last look."""
        moving, self._moving = self._moving or not self._waiting, False
        return moving

    def close(self) -> None:
        self.closed = True
        self._transport.abort()


class Wire:
    def __init__(self, url: str, patience: float) -> None:
        """`patience`: seconds to connect, and without any answer."""
        self._options: dict[str, Any] = dict(parse_url(url))
        self._patience = patience
        self._link: _Link | None = None
        self._connecting: asyncio.Task[_Link] | None = None

    async def call(self, *command: str | int | bytes) -> Any:
        """Raises redis's ConnectionError or ResponseError, OSError, or TimeoutError."""
        link = self._link
        if link is None or link.closed:
            link = await self._connected()
        return await link.call(pack(command))

    async def _connected(self) -> _Link:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Link:
        options, loop = self._options, asyncio.get_running_loop()
        link: _Link | None = None
        try:
            async with asyncio.timeout(self._patience):
                if path := options.get("path"):
                    _, link = await loop.create_unix_connection(_Link, path)
                else:
                    host, port = options.get("host", "localhost"), options.get("port", 6379)
                    _, link = await loop.create_connection(_Link, host, port, ssl=_tls(options))
                if password := options.get("password"):
                    user = [options["username"]] if options.get("username") else []
                    await link.call(pack(["AUTH", *user, password]))
                if database := options.get("db"):
                    await link.call(pack(["SELECT", str(database)]))
        except BaseException:
            if link is not None:
                link.close()
            raise
        else:
            self._link = link
            return link
        finally:
            self._connecting = None

    async def keep_looking(self) -> None:
        """Runs as long as the process."""
        still = 0
        while True:
            await asyncio.sleep(LOOK)
            link = self._link
            still = 0 if link is None or link.look() else still + 1
            if link is not None and still * LOOK >= self._patience:
                link.close()
                still = 0

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


def pack(command: Sequence[str | int | bytes]) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]
    return packed


def _tls(options: dict[str, Any]) -> ssl.SSLContext | None:
    """The query of a rediss:// address, as redis-py reads it."""
    if options.get("connection_class") is None or "SSL" not in options["connection_class"].__name__:
        return None
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    if str(options.get("ssl_check_hostname", "true")).lower() in ("false", "0", "no"):
        context.check_hostname = False
    if options.get("ssl_cert_reqs") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate := options.get("ssl_certfile"):
        context.load_cert_chain(certificate, options.get("ssl_keyfile"))
    return context
