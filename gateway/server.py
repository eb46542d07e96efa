"""`capsule serve`: uvicorn around the connections of `protocol.py`, and the time that a request's body may take."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import uvicorn

from gateway import log, protocol
from gateway.errors import RequestMalformed
from gateway.settings import Settings
from gateway.supervisor import METRICS_FOLDER, Supervisor, metrics_folder

BODY_SECONDS = 30.0  # that a body may take to arrive, and
BODY_RATE = 16_384  # one second more for so many bytes that have arrived, up to UPLOAD_SECONDS
END_SECONDS = 10  # at a stop, from the end of the drain until what still runs is cut


class TimedReceive:
    """ASGI's `receive` of one request, which raises RequestMalformed if the body arrives too slowly or not at all."""

    def __init__(self, receive: Callable[[], Any]) -> None:
        self._receive = receive
        self._began = asyncio.get_running_loop().time()
        self._bytes = 0
        self._whole = False
        self.answered = False  # a response has begun: there is no other answer any more

    async def __call__(self) -> Any:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(
                self._began + min(BODY_SECONDS + self._bytes / BODY_RATE, protocol.UPLOAD_SECONDS)
            ):
                message = await self._receive()
        except TimeoutError:
            return self._fail(f"The body did not arrive in time: send at least {BODY_RATE // 1024} KiB per second.")
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
    """Runs the gateway until it is stopped. Returns the exit code."""
    config = uvicorn.Config(
        "gateway.app:create_app",
        factory=True,
        host=host,
        port=port,
        workers=workers,
        loop="uvloop",
        http=protocol.Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # it would log paths, and the path of a deploy hook is a secret
        server_header=False,
        proxy_headers=False,  # sessions.py reads X-Forwarded-For, and trusts it from a proxy only
        backlog=4096,
        # Streams end themselves when the drain is over. This ends what does not.
        timeout_graceful_shutdown=int(settings.drain) + END_SECONDS,
    )
    if workers == 1:
        os.environ.pop(METRICS_FOLDER, None)  # it may hold the figures of processes that are no more
        uvicorn.Server(config).run()
        return 0
    log.configure(settings)
    with metrics_folder() as folder:
        os.environ[METRICS_FOLDER] = str(folder)
        return Supervisor(config, config.bind_socket(), folder).run()
