"""Serves the model stand-in inside `capsule dev` itself, on its event loop, and holds ports."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from litestar import Litestar

from capsule_gateway.dev.children import StartFailed


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # `capsule dev` handles the signals.
        yield


def hold_port(port: int, user: str) -> socket.socket:
    """Listens on the port. Raises StartFailed if it is in use."""
    try:
        if _is_used_on_ipv6(port):
            raise FileExistsError
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        raise StartFailed(
            f"Port {port} is in use, and the {user} needs it. "
            "Stop the process that listens there, or choose other ports, for example with CAPSULE_PORT=9000."
        ) from None


def _is_used_on_ipv6(port: int) -> bool:
    # A browser tries ::1 first for `localhost` and would reach the other process.
    with contextlib.suppress(OSError), socket.create_connection(("::1", port), timeout=1):
        return True
    return False


@asynccontextmanager
async def serve_app(app: Litestar, listener: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        # The socket already listens, so clients that connect before the server is up wait in its queue.
        yield
    finally:
        server.should_exit = True
        await task
