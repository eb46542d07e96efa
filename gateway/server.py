"""uvicorn with limits on what a client may send and on how long it may hold a connection.

uvicorn alone waits forever for the end of a request's head, accepts a head of any size, and keeps a connection whose
client stopped reading. `BoundedProtocol` counts the bytes of a head, and once a second `end_overdue_connections`
aborts the connections that exceed a time limit.

The protocol also gives the token path two short cuts past ASGI's coroutines, as `scope["state"]["connection"]`:
`write_chunk`, and `on_lost` instead of a task that waits for `http.disconnect`. Under another server, the token path
works without them.

`BoundedProtocol` overrides methods of a uvicorn module that is not public, so pyproject.toml pins uvicorn's minor
version.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.supervisors import Multiprocess

HEAD_BYTES = 65_536  # of a request line and its headers
HEAD_SECONDS = 15.0  # from the start of a connection or a request to the end of the head
STALL_SECONDS = 60.0  # that a client may leave a response unread
LEFTOVER_SECONDS = 5.0  # that a body may continue after its response

CONNECTIONS: set[BoundedProtocol] = set()


class BoundedProtocol(HttpToolsProtocol):
    head_bytes = 0
    in_head = True  # a head is under way, or awaited
    uploading = False  # a body is under way
    stalled = False  # the client does not read
    since = 0.0  # when the connection began to wait for what these three say, on the loop's clock
    on_lost: Callable[[], None] | None = None

    def write_chunk(self, body: bytes) -> bool:
        """Writes one chunk of the chunked response under way. Returns False if the client reads too slowly, or left."""
        if self.stalled or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        CONNECTIONS.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        CONNECTIONS.discard(self)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self.in_head:
            self.head_bytes += len(data)
        super().data_received(data)
        if self.in_head and self.head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_431_response()

    def send_431_response(self) -> None:
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        )
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self.in_head = True
        self.since = self.loop.time()

    def on_headers_complete(self) -> None:
        # `head_bytes` may include a body that arrived with the head, so over the limit the headers are added up.
        if self.head_bytes > HEAD_BYTES and sum(len(n) + len(v) + 4 for n, v in self.headers) > HEAD_BYTES:
            raise ValueError("the head is too large")  # the parser answers 400 and closes
        self.in_head = False
        self.uploading = True
        self.head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.uploading = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self.stalled = True
        self.since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.stalled = False
        super().resume_writing()

    def end_if_overdue(self, now: float) -> None:
        waited = now - self.since
        if self.stalled:
            overdue = waited > STALL_SECONDS
        elif self.uploading:
            answered = self.cycle is not None and self.cycle.response_complete
            overdue = answered and waited > LEFTOVER_SECONDS
        else:
            # Between requests, uvicorn's own keep-alive timer runs.
            overdue = self.in_head and self.timeout_keep_alive_task is None and waited > HEAD_SECONDS
        if overdue:
            self.transport.abort()


async def end_overdue_connections() -> None:
    """Runs for the life of the process."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(1)
        for connection in list(CONNECTIONS):
            connection.end_if_overdue(loop.time())


def serve(host: str, port: int, workers: int, drain: float) -> None:
    config = uvicorn.Config(
        "gateway.app:create_app",
        factory=True,
        host=host,
        port=port,
        workers=workers,
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # it would log paths, and the path of a deploy hook is a secret
        server_header=False,
        proxy_headers=False,  # sessions.py reads X-Forwarded-For, and trusts it from a proxy only
        backlog=4096,
        # Streams end themselves when the drain is over. This ends what does not.
        timeout_graceful_shutdown=int(drain) + 10,
    )
    if workers == 1:
        uvicorn.Server(config).run()
        return
    with tempfile.TemporaryDirectory(prefix="capsule-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # where each process writes its metrics
        Multiprocess(config, sockets=[config.bind_socket()]).run()
