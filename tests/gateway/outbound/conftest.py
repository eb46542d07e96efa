"""Servers for the client under test, names that resolve to them, and the client that calls them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import pytest

from gateway.outbound.addresses import CallFailed, resolve
from gateway.outbound.client import Client
from tests.support.background import cancel

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[..., Awaitable[int]]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Names:
    """Answers lookups of names in order and repeats the last answer."""

    def __init__(self, answers: Mapping[str, Sequence[list[str] | Exception]]) -> None:
        self._answers = {name: [*each] for name, each in answers.items()}
        self.asked: list[str] = []  # names that were looked up
        self.resolve = functools.partial(resolve, look_up=self._look_up)

    async def _look_up(self, name: str, _port: int, **_: object) -> list[str]:
        self.asked.append(name)
        queue = self._answers[name.removesuffix(".")]
        found = queue.pop(0) if len(queue) > 1 else queue[0]
        if isinstance(found, Exception):
            raise found
        return found


def answering(*pieces: bytes, then: Callable[[], Awaitable[object]] | None = None) -> Handler:
    """Returns a handler that reads a request, sends the pieces, and then closes or runs `then`."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if then is not None:
            await then()

    return handler


async def forever() -> None:
    await asyncio.sleep(60)


class Recorder:
    """Answers every request with 200 and records it."""

    def __init__(self, answer: bytes = OK) -> None:
        self.answer = answer
        self.connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            self.requests.append(head + await reader.readexactly(int(length[1]) if length else 0))
            writer.write(self.answer)
            await writer.drain()


async def failure(client: Client, url: str, *, budget: float = 5, max_bytes: int = 1000) -> CallFailed:
    with pytest.raises(CallFailed) as failed:
        await client.fetch("GET", url, tenant="acc", budget=budget, max_bytes=max_bytes)
    assert "s3cret" not in str(failed.value)
    return failed.value


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
