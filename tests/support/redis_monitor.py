"""Records every command that a Redis server receives, with MONITOR."""

import asyncio
import contextlib
import re
from typing import Self

from tests.support.background import cancel
from tests.support.redis_servers import RedisServer

# `1750000000.123456 [0 127.0.0.1:4711] "GET" "key"`; commands of a script have "lua" as the address.
LINE = re.compile(rb'^\+\d+\.\d+ \[\d+ (\S+)\] "(\w+)"(?: "([^"]*)")?', re.MULTILINE)


class Wiretap:
    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._heard = bytearray()

    async def __aenter__(self) -> Self:
        reader, self._writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        self._writer.write(b"MONITOR\r\n")
        await reader.readline()
        self._task = asyncio.create_task(self._listen(reader))
        return self

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self._heard += data

    async def __aexit__(self, *_: object) -> None:
        await cancel(self._task)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    @property
    def heard(self) -> bytes:
        return bytes(self._heard)

    def commands(self, since: int = 0) -> list[str]:
        """Returns the commands of clients as `NAME first-argument`, without the commands of scripts."""
        return [
            f"{name.decode().upper()} {first.decode()}"
            for address, name, first in LINE.findall(bytes(self._heard[since:]))
            if address != b"lua"
        ]

    def has_seen(self, command: str, times: int, *, since: int) -> bool:
        return self.commands(since).count(command) >= times

    @property
    def position(self) -> int:
        return len(self._heard)
