"""Runs `capsule serve`: uvicorn with the connections of `protocol.py`. Also limits the time of a request's body."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from gateway import log
from gateway.errors import BackboneUnavailable, RequestMalformed
from gateway.loops import ignore_late_lookups, stop_at_hangup
from gateway.operations.layout import prepare_data
from gateway.server import protocol
from gateway.server.supervisor import CANNOT_START_EXIT, METRICS_FOLDER, Supervisor, metrics_folder
from gateway.settings import Settings
from gateway.settings.addresses import UNIX

UVICORN = logging.getLogger("uvicorn.error")

BODY_SECONDS = 30.0  # that a body may take to arrive
BODY_BYTES_PER_SECOND = 16_384  # extend that time by one second, up to UPLOAD_SECONDS
SHUTDOWN_SECONDS = 10  # at a stop, from the end of the drain until running requests are aborted


class TimedReceive:
    """ASGI's `receive` of one request. It raises RequestMalformed if the body arrives too slowly or is incomplete."""

    def __init__(self, receive: Callable[[], Any]) -> None:
        self._receive = receive
        self._began = asyncio.get_running_loop().time()
        self._bytes = 0
        self._whole = False
        self.answered = False  # a response has begun, so an error can no longer be sent

    async def __call__(self) -> Any:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(
                self._began + min(BODY_SECONDS + self._bytes / BODY_BYTES_PER_SECOND, protocol.UPLOAD_SECONDS)
            ):
                message = await self._receive()
        except TimeoutError:
            return self._fail(
                f"The body did not arrive in time: send at least {BODY_BYTES_PER_SECOND // 1024} KiB per second."
            )
        if message["type"] == "http.disconnect":
            return self._fail("The body is incomplete.")
        self._bytes += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        return message

    def _fail(self, message: str) -> dict[str, str]:
        self._whole = True
        if self.answered:
            return {"type": "http.disconnect"}
        raise RequestMalformed(message)


def serve(host: str, port: int, workers: int, settings: Settings) -> int:
    """Upgrades the data if necessary, and runs the gateway until it is stopped. Returns the exit code.

    Raises LayoutFault.
    """
    stop_at_hangup()
    log.configure(settings)
    with suppress(BackboneUnavailable):  # the processes wait until it answers, and log why it does not
        uvloop.run(_prepare(settings))  # which, unlike asyncio, does not wait for a lookup that hangs
    config = uvicorn.Config(
        "gateway.app:create_app",
        factory=True,
        host=host,
        port=port,
        workers=workers,
        loop="uvloop",
        http=protocol.HttpConnection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # it would log paths, and the path of a deploy hook is a secret
        server_header=False,
        proxy_headers=False,  # sessions.py reads X-Forwarded-For, and only from a trusted proxy
        backlog=4096,
        # Streams end by themselves after the drain. This aborts the rest.
        timeout_graceful_shutdown=int(settings.drain) + SHUTDOWN_SECONDS,
    )
    listeners = _bind(host, port, settings)
    if workers == 1:
        os.environ.pop(METRICS_FOLDER, None)  # the folder may contain the values of former processes
        Server(config).run(listeners)
        return 0
    with metrics_folder() as folder:
        os.environ[METRICS_FOLDER] = str(folder)
        return Supervisor(config, listeners, folder, partial(_announce, listeners)).run()


class Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _announce(sockets or [])


def _announce(listeners: list[socket.socket]) -> None:
    """Logs uvicorn's line. uvicorn itself would log it when it binds the port, seconds before that is listened to."""
    host, port, *_ = listeners[0].getsockname()
    UVICORN.info("Uvicorn running on http://%s:%d", f"[{host}]" if ":" in host else host, port)


async def _prepare(settings: Settings) -> None:
    ignore_late_lookups()
    await prepare_data(settings)


def _bind(host: str, port: int, settings: Settings) -> list[socket.socket]:
    """Binds the port, and the Unix socket to which Caddy connects, if GATEWAY_UPSTREAM names one."""
    listeners = [socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)]
    listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listeners[0].bind((host, port))
    except OSError as error:  # since the command line has checked it
        UVICORN.error(error)
        sys.exit(CANNOT_START_EXIT)
    listeners[0].set_inheritable(True)
    if settings.upstream.startswith(UNIX):
        path = Path(settings.upstream.removeprefix(UNIX))
        path.unlink(missing_ok=True)  # left by an earlier gateway
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o666)  # the folder decides who may connect
        listener.set_inheritable(True)
        listeners.append(listener)
    return listeners
