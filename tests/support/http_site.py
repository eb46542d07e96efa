"""A small application behind the gateway's HTTP protocol, over real sockets."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from functools import partial

import uvicorn

from gateway.server import connections
from gateway.server.connections import ConnectionLimit
from gateway.server.protocol import TIMES, ConnectionTimes, HttpConnection
from tests.support.polling import wait_until

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HANG = GET.replace(b"/ ", b"/hang ", 1)


class Site:
    """An application that records its requests."""

    def __init__(self) -> None:
        self.left = 0  # requests whose client disconnected
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.requests: list[tuple[str, str]] = []  # methods and paths
        self.bodies: list[bytes] = []  # of /echo

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        path = scope["path"]
        self.requests.append((scope["method"], path))
        if path == "/read":
            while (await receive()).get("more_body"):
                pass
        self.headers.append(scope["headers"])
        if path == "/hang":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left += 1
            return
        if path == "/echo":
            body = b""
            while (message := await receive())["type"] == "http.request":
                body += message["body"]
                if not message["more_body"]:
                    break
            self.bodies.append(body)
        if path == "/slow":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(5):
                await send({"type": "http.response.body", "body": b"slow ", "more_body": True})
                await asyncio.sleep(0.05)
            await send({"type": "http.response.body", "body": b"end"})
            return
        if path in ("/endless", "/nearly"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            transport = scope["state"]["connection"].transport
            while not transport.is_closing() and (path == "/endless" or not transport.get_write_buffer_size()):
                await send({"type": "http.response.body", "body": b"x" * 8192, "more_body": True})
                await asyncio.sleep(0.01 if path == "/endless" else 0)
            await send({"type": "http.response.body", "body": b""})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def serving(
    site: Site,
    times: ConnectionTimes = TIMES,
    *,
    limit: ConnectionLimit = connections.CONNECTION_LIMIT,
    sweep: float = connections.SWEEP_SECONDS,
) -> AsyncIterator[int]:
    """Serves the site until the block ends. Yields the port. Checks the times every `sweep` seconds."""
    listener = socket.create_server(("127.0.0.1", 0))
    # Connections inherit it, so that a client that does not read stalls soon.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    config = uvicorn.Config(
        site,
        http=partial(HttpConnection, times=times, limit=limit),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    running = uvicorn.Server(config)
    tasks = [
        asyncio.create_task(running.serve(sockets=[listener])),
        asyncio.create_task(connections.sweep_connections(seconds=sweep)),
    ]
    await wait_until(lambda: running.started)
    try:
        yield listener.getsockname()[1]
    finally:
        running.should_exit = True
        await tasks[0]
        tasks[1].cancel()
