"""A TCP proxy in front of a server. A test switches network faults on and off."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Self

from tests.support.background import cancel


@dataclass(eq=False)
class Link:
    """One connection through the proxy."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    asked: bytes = b""  # the last request

    def cut(self) -> None:
        self.client.transport.abort()
        self.server.transport.abort()


@dataclass
class Proxy:
    """
    | fault | effect |
    | --- | --- |
    | `down` | every connection is closed, including new ones |
    | `swallowing` | connections stay open, and nothing arrives in either direction |
    | `delay` | each answer takes so many seconds more |
    | `hold_requests`, `hold_answers` | requests with this text, or the answers to them, wait for `let_go` |
    | `lose_request` | once, after `spared` others, a request with this text is lost, and the connection closes |
    | `lose_answer` | once, the answer to a request with this text is lost, and the connection closes |

    A request that waits here reaches the server even if its client is gone, like a request on the network.
    """

    target: int
    port: int = 0
    down: bool = False
    swallowing: bool = False
    delay: float = 0.0
    hold_requests: bytes | None = None
    hold_answers: bytes | None = None
    lose_request: bytes | None = None
    spared: int = 0
    lose_answer: bytes | None = None
    held: int = 0  # the number of times that something waited
    links: set[Link] = field(default_factory=set)
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.down = True  # for a connection that was accepted before the server closed and is served afterwards
        self._server.close()
        self.cut()
        await cancel(*self._tasks)

    def cut(self) -> None:
        for link in self.links:
            link.cut()

    def go_down(self) -> None:
        self.down = True
        self.cut()

    def let_go(self) -> None:
        self.hold_requests = self.hold_answers = None
        self._released.set()
        self._released = asyncio.Event()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also if it was canceled before it started

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            return
        answers, server = await asyncio.open_connection("127.0.0.1", self.target)
        link = Link(writer, server)
        if self.down:  # since then
            link.cut()
            return
        self.links.add(link)
        try:
            await asyncio.gather(self._requests(link, reader), self._answers(link, answers))
        finally:
            self.links.discard(link)
            link.cut()

    async def _requests(self, link: Link, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if self.swallowing:
                    continue
                link.asked = data
                if self.lose_request and self.lose_request in data:
                    if not self.spared:
                        self.lose_request = None
                        link.cut()
                        return
                    self.spared -= 1
                if self.hold_requests and self.hold_requests in data:
                    self.held += 1
                    await self._released.wait()
                link.server.write(data)
                await link.server.drain()
        with contextlib.suppress(ConnectionError, OSError):
            link.server.write_eof()

    async def _answers(self, link: Link, answers: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await answers.read(65536):
                if self.lose_answer and self.lose_answer in link.asked:
                    self.lose_answer = None
                    link.cut()
                    return
                if self.hold_answers and self.hold_answers in link.asked:
                    self.held += 1
                    await self._released.wait()
                if self.delay:
                    asyncio.get_running_loop().call_later(self.delay, link.client.write, data)
                elif not self.swallowing:
                    link.client.write(data)
                    await link.client.drain()
        link.cut()
