"""Serves the pages of all apps on one port: forwards connections to the demo app or to the server of hosted apps.

A browser uses each connection for one host only, so the first request decides for the whole connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

HEAD_BYTES = 65_536
HEAD_SECONDS = 10.0
CHUNK_BYTES = 65_536
HOST = re.compile(rb"\r\nhost:[ \t]*([^\r\n]*)", re.IGNORECASE)


@asynccontextmanager
async def serve_front(listener: socket.socket, demo_port: int, apps_port: int) -> AsyncIterator[None]:
    running: set[asyncio.Task[None]] = set()

    async def accept_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        running.add(task)
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(HEAD_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                await _forward_connection(head, reader, writer, apps_port if _is_hosted(head) else demo_port)
        finally:
            writer.close()
            running.discard(task)

    server = await asyncio.start_server(accept_connection, sock=listener, limit=HEAD_BYTES)
    try:
        yield
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _is_hosted(head: bytes) -> bool:
    found = HOST.search(head)
    name = found[1].decode("latin-1").partition(":")[0] if found else ""
    return name.endswith(".apps.localhost") and name != "demo.apps.localhost"


async def _forward_connection(
    head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
) -> None:
    there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        there_writer.write(head)
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy_stream(reader, there_writer))
            group.create_task(_copy_stream(there_reader, writer))
    finally:
        there_writer.close()


async def _copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while part := await reader.read(CHUNK_BYTES):
            writer.write(part)
            await writer.drain()
        writer.close()
