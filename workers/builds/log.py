"""The log of one deploy, written to Redis twice a second."""

import asyncio
import contextlib
import re
import time
from functools import partial
from typing import Self

from gateway.cancellation import finish_despite_cancellation
from gateway.deploys.logs import stamp_line
from gateway.deploys.states import LOG_BYTES, Deploy, Deploys
from gateway.redis.client import COMMAND_SECONDS, until_redis_answers

FLUSH_SECONDS = 0.5  # between flushes
RESOLUTION_MS = 100  # between two times in the log
# Escape sequences in a build's output could move the cursor of a terminal that follows the log.
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


class DeployLog:
    """Collects lines in memory and flushes them regularly. Lines wait in memory while Redis is unavailable."""

    def __init__(self, deploys: Deploys, deploy: Deploy) -> None:
        self._deploys, self._deploy = deploys, deploy
        self._lines: list[str] = []
        self._stamped = 0  # time of the last line that has a time, ms
        self._size = 0  # bytes of all lines so far; lines beyond the log's bound are dropped
        self._lock = asyncio.Lock()

    def write_line(self, line: str) -> None:
        if self._size <= LOG_BYTES:
            line = self._stamp(CONTROL.sub("", line))
            self._size += len(line.encode())
            self._lines.append(line)

    def _stamp(self, line: str) -> str:
        """Adds a time to the line. Lines that arrive together share the time of the first, which saves space."""
        now = int(time.time() * 1000)
        if now - self._stamped < RESOLUTION_MS:
            return line + "\n"
        self._stamped = now
        return stamp_line(line, now)

    async def flush(self) -> None:
        async with self._lock:
            while self._lines:
                count = len(self._lines)
                text = "".join(self._lines[:count])
                append = partial(self._deploys.append_log, self._deploy, text)
                await until_redis_answers(append)
                del self._lines[:count]

    async def _flush_regularly(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.flush()

    async def __aenter__(self) -> Self:
        self._flushing = asyncio.create_task(self._flush_regularly())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._flushing.cancel()
        await asyncio.gather(self._flushing, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await finish_despite_cancellation(asyncio.wait_for(self.flush(), COMMAND_SECONDS))
