"""Writes that count only once enough replicas have them.

`WAIT` confirms all earlier writes of its connection, and blocks later commands. So calls are sent in groups, each
followed by one WAIT, and a group is sent once the WAIT of the previous group is answered. The connection serves nothing
else, because a lagging replica must not delay other calls.
"""

import asyncio
from itertools import zip_longest
from typing import Any, NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.cancellation import cancel
from gateway.redis.pipeline import MAX_PENDING_CALLS, Find, Pipeline, pack_command

WAIT_SECONDS = 0.5  # that a WAIT lasts at most; a call may have to wait for two of them


class Replicated(NamedTuple):
    answer: Any
    replicas: int  # that have the write


class ReplicatedPipeline(Pipeline):
    """A `Pipeline` whose calls, except CLUSTER, return `Replicated`."""

    def __init__(self, url: str, timeout: float, find: Find | None, replicas: int) -> None:
        super().__init__(url, timeout, find)
        self._wanted = replicas
        self._wait = pack_command(("WAIT", replicas, int(WAIT_SECONDS * 1000)))
        self._group: list[tuple[bytes, asyncio.Future[Replicated]]] = []  # the next one
        self._sending: asyncio.Task[None] | None = None

    async def call(self, *command: str | int | bytes) -> Any:
        if command[0] == "CLUSTER":
            return await super().call(*command)
        if len(self._group) >= MAX_PENDING_CALLS:
            raise RedisConnectionError("too many calls wait for replicas")
        answer: asyncio.Future[Replicated] = asyncio.get_running_loop().create_future()
        self._group.append((pack_command(command), answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await answer

    async def call_asking(self, *command: str | int | bytes) -> Replicated:
        connection = await self._connected()
        calls = (pack_command(("ASKING",)), pack_command(command), self._wait)
        _, answer, replicas = await asyncio.gather(*map(connection.call, calls))
        return Replicated(answer, replicas)

    async def _send(self) -> None:
        """Sends one group after another, until no call waits."""
        while self._group:
            group, self._group = self._group, []
            replies: list[Any] = []
            replicas: Any = RedisConnectionError("the connection is closed")
            try:
                connection = await self._connected()
                calls = [connection.call(command) for command, _ in group]
                *replies, replicas = await asyncio.gather(*calls, connection.call(self._wait), return_exceptions=True)
                if isinstance(replicas, int) and replicas < self._wanted:
                    self.request_check()
            except Exception as error:  # no connection
                replicas = error
            finally:
                if isinstance(replicas, Exception):  # the next group fails with this one: it has the same connection
                    group, self._group = group + self._group, []
                for (_, answer), reply in zip_longest(group, replies, fillvalue=replicas):
                    _settle_answer(answer, reply, replicas)

    async def close(self) -> None:
        if self._sending is not None:
            await cancel(self._sending)
        for _, answer in self._group:  # the task had not started
            _settle_answer(answer, RedisConnectionError("the connection is closed"), 0)
        await super().close()


def _settle_answer(answer: asyncio.Future[Replicated], reply: Any, replicas: Any) -> None:
    if answer.done():  # its caller was canceled
        return
    fault = next((result for result in (reply, replicas) if isinstance(result, BaseException)), None)
    if fault is None:
        answer.set_result(Replicated(reply, replicas))
    else:
        answer.set_exception(fault)


def make_pipeline(url: str, timeout: float, find: Find | None, replicas: int) -> Pipeline:
    return ReplicatedPipeline(url, timeout, find, replicas) if replicas else Pipeline(url, timeout, find)
