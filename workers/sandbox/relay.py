"""The relay between the visitors of an app and the app: it accepts connections from a Unix socket outside the namespace
and connects them to a port of 127.0.0.1 inside.

Each connection is a request, or a WebSocket. The relay bounds how many of them an app has in progress, so that an app
that hangs holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from workers.sandbox.network import CHUNK_BYTES, Tasks, abort, keep_task, splice

BACKLOG = 4_096  # connections that wait to be accepted
REQUESTS, WAITING = 384, 128  # of an app's visitors: in progress, and waiting to begin
WAIT_SECONDS = 5.0  # that they wait
IDLE_SECONDS = 300.0  # without a byte in either direction, after which a connection ends
BUSY = b"""HTTP/1.1 503 Service Unavailable\r
Retry-After: 1\r
Content-Type: text/plain; charset=utf-8\r
Content-Length: 44\r
Connection: close\r
\r
The app has too many requests in progress.\r
"""


async def relay(listener: socket.socket, port: int) -> None:
    """Connects the Unix socket to a port of this namespace. Runs until killed."""
    connections: Tasks = set()
    room = asyncio.Semaphore(REQUESTS)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_task(connections)
        try:
            if len(connections) > REQUESTS + WAITING:
                raise TimeoutError
            async with asyncio.timeout(WAIT_SECONDS):
                await room.acquire()
        except TimeoutError:
            return await refuse(reader, writer)
        try:
            await splice((reader, writer), await asyncio.open_connection("127.0.0.1", port), IDLE_SECONDS)
        except OSError:
            abort(writer)
        finally:
            room.release()

    async with await asyncio.start_unix_server(connect, sock=listener, backlog=BACKLOG) as server:
        await server.serve_forever()


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the request, without reading more of it than has arrived."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(WAIT_SECONDS):
            await reader.read(CHUNK_BYTES)
            writer.write(BUSY)
            await writer.drain()
    writer.close()
