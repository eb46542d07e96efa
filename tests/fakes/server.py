"""A raw HTTP/1.1 server with control over every byte, on the event loop of the test.

A script is a list of steps, played as the response to one request:

| step | effect |
| --- | --- |
| `Head` | sends the status line and headers; without one, the first body step begins a 200 event stream |
| `bytes` | writes a part of the body: as a chunk, or unchanged after a `Head` with a length or `Raw` |
| `Raw` | writes bytes unchanged |
| number | waits that many seconds |
| `asyncio.Event` | waits for it |
| `HANG` | waits until the client disconnects |
| `CLOSE` | closes the connection |
| `RESET` | closes the connection with a TCP reset |
| callable | is called with the exchange and awaited |

At the end of a script, a chunked body is terminated, and the connection is kept for the next request.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from tests.support.background import cancel

REASONS = {200: "OK", 204: "No Content", 302: "Found"}


class End(Enum):
    HANG = "hang"
    CLOSE = "close"
    RESET = "reset"


HANG, CLOSE, RESET = End


@dataclass
class Head:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream"})


@dataclass
class Raw:
    data: bytes


@dataclass
class Exchange:
    """One request, and the progress of its response."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int
    writer: asyncio.StreamWriter
    at: float = field(default_factory=time.monotonic)
    canceled: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False
    written: int = 0
    chunked: bool | None = None

    def header(self, name: str) -> str | None:
        return next((v for k, v in self.headers if k == name.lower()), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def play(self, steps: "Iterable[Step]") -> None:
        for step in steps:
            await self._step(step)
        if self.chunked is None:
            await self._step(Head())
        if self.chunked:
            await self._write(b"0\r\n\r\n")

    async def _step(self, step: "Step") -> None:
        match step:
            case Head(status, headers):
                lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}"]
                lines += [f"{k}: {v}" for k, v in headers.items()]
                self.chunked = status != 204 and "content-length" not in map(str.lower, headers)
                if self.chunked:
                    lines.append("Transfer-Encoding: chunked")
                await self._write("\r\n".join([*lines, "", ""]).encode())
            case bytes():
                if self.chunked is None:
                    await self._step(Head())
                await self._write(b"%x\r\n%b\r\n" % (len(step), step) if self.chunked else step)
            case Raw(data):
                self.chunked = self.chunked or False
                await self._write(data)
            case int() | float():
                await asyncio.sleep(step)
            case asyncio.Event():
                await step.wait()
            case End.HANG:
                await asyncio.Event().wait()
            case End.CLOSE:
                raise ConnectionAbortedError
            case End.RESET:
                linger = struct.pack("ii", 1, 0)
                self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.writer.transport.abort()
                raise ConnectionAbortedError
            case _:
                await step(self)

    async def _write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()
        self.written += len(data)


Step = Head | Raw | bytes | float | asyncio.Event | End | Callable[[Exchange], Awaitable[None]]
Script = list[Step]


def answer(status: int, body: Any = b"", headers: Mapping[str, str] | None = None) -> Script:
    """Returns a complete response with a length. Anything except bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
    return [Head(status, head), data]


class _Protocol(asyncio.StreamReaderProtocol):
    """Detects at once, without reading, that the client has disconnected."""

    def __init__(self, reader: asyncio.StreamReader, connected: Any) -> None:
        super().__init__(reader, connected)
        self.gone = asyncio.Event()

    def eof_received(self) -> bool | None:
        self.gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        super().connection_lost(exc)


class FakeServer:
    """A server that answers each request with `reply`. A subclass can choose the answer in `script`."""

    reply: Script = answer(200, {})
    host = "127.0.0.1"

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self.exchanges: list[Exchange] = []
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def script(self, exchange: Exchange) -> Script:
        return self.reply

    async def __aenter__(self) -> Self:
        # With a small send buffer, tests see back pressure soon.
        listener = socket.create_server((self.host, 0), backlog=2048)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Protocol(asyncio.StreamReader(2**20), self._connected), sock=listener, backlog=2048, ssl=self.tls
        )
        self.port = listener.getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await cancel(*self._tasks)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        connection = self.connections
        try:
            while True:
                exchange = await self._read(reader, writer, connection)
                self.exchanges.append(exchange)
                await self._answer(exchange, writer.transport.get_protocol().gone)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()
            writer.transport.abort()  # if the server ends before the client has read everything

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> Exchange:
        head = await reader.readuntil(b"\r\n\r\n")
        request, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, path, _ = request.split(" ")
        headers = [(k.lower(), v.strip()) for k, _, v in (line.partition(":") for line in lines)]
        body = b""
        if ("transfer-encoding", "chunked") in headers:
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        elif length := dict(headers).get("content-length"):
            body = await reader.readexactly(int(length))
        return Exchange(method, path, headers, body, connection, writer)

    async def _answer(self, exchange: Exchange, gone: asyncio.Event) -> None:
        watch = asyncio.create_task(gone.wait())
        play = asyncio.create_task(exchange.play(self.script(exchange)))
        try:
            await asyncio.wait({watch, play}, return_when=asyncio.FIRST_COMPLETED)
            if not play.done():
                raise ConnectionResetError
            play.result()
            exchange.finished = True
        except OSError as end:
            if not isinstance(end, ConnectionAbortedError):
                exchange.canceled.set()
            raise
        finally:
            await cancel(watch, play)
