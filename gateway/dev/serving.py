"""The model stand-in and the demo app run inside `make run` itself, on its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from litestar import Litestar

from gateway.dev.children import Refusal


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals belong to the supervisor.
        yield


def claim(port: int, what: str) -> socket.socket:
    """Raises Refusal when another has the port."""
    try:
        if _taken_on_ipv6(port):
            raise FileExistsError
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        raise Refusal(
            f"Port {port} is taken, and the {what} needs it. "
            "Stop what listens there, or choose other ports with CAPSULE_PORT=9000 make run."
        ) from None


def _taken_on_ipv6(port: int) -> bool:
    # Who listens there would get, before us, the browser that asks for `localhost`.
    with contextlib.suppress(OSError), socket.create_connection(("::1", port), timeout=1):
        return True
    return False


@asynccontextmanager
async def served(app: Litestar, listener: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        # The socket listens already: who comes before the server is up waits in its queue.
        yield
    finally:
        server.should_exit = True
        await task
