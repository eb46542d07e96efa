"""A server to call, and the client that calls it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

import pytest

from gateway.outbound.client import Client
from tests.gateway.outbound.origins import Handler, Serve
from tests.support.background import cancel


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers on loopback, and at the end stops them and their tasks."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(handler: Handler, tls: ssl.SSLContext | None = None) -> int:
            tasks: set[asyncio.Task[None]] = set()

            async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                tasks.add(task)
                with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                    await handler(reader, writer)
                writer.transport.abort()

            server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)

            async def end() -> None:
                server.close()
                await cancel(*tasks)

            stack.push_async_callback(end)
            return int(server.sockets[0].getsockname()[1])

        yield start


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Client(allow_private=True) as client:
        yield client
