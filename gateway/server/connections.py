"""Limits how many client connections a process accepts, and how long it waits for their clients.

The file descriptors of the process limit the connections, so that each client's stream can still open one to the
provider. At the limit, connections with incomplete requests are evicted, those that have waited longest first. Once a
second, `sweep_connections` closes idle connections and aborts those that exceed a time limit.
"""

import asyncio
import collections
import heapq
import resource
from collections.abc import Callable
from functools import partial
from typing import Protocol

from gateway.loops import DESCRIPTORS, every, raise_descriptor_limit

SWEEP_SECONDS = 1.0  # between two checks for connections that exceed a limit
RESERVED_DESCRIPTORS = 512  # for Redis, key sets and files; or a quarter of all descriptors, if that is less


class ClientConnection(Protocol):
    """The methods of a connection (`protocol.py`) that this module uses."""

    def is_waiting_for_request(self) -> bool: ...
    def eviction_key(self, now: float) -> tuple[bool, bool, float]: ...
    def is_overdue(self, now: float) -> bool: ...
    def is_idle(self, now: float) -> bool: ...
    def end(self, reason: str) -> None: ...
    def close(self) -> None: ...


CONNECTIONS: set[ClientConnection] = set()
ENDED: collections.Counter[str] = collections.Counter()  # since the last sweep, by reason


class ConnectionLimit:
    """The number of connections that this process accepts."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._no_victims_until = 0.0  # on the loop's clock: until then, no connection can be evicted

    def make_room(self, now: float) -> bool:
        """Returns whether one more connection fits, and if necessary evicts those that wait longest for a request."""
        if len(CONNECTIONS) < self.maximum:
            return True
        if now < self._no_victims_until:
            return False
        waiting = [c for c in CONNECTIONS if c.is_waiting_for_request()]
        # One in a hundred at once, because finding them requires a pass over all.
        victims = heapq.nsmallest(self.maximum // 100 + 1, waiting, key=lambda c: c.eviction_key(now))
        for victim in victims:
            CONNECTIONS.discard(victim)
            victim.end("evicted")
        if not victims:
            self._no_victims_until = now + 0.1
        return bool(victims)


def max_connections(descriptors: int) -> int:
    """Returns half of the unreserved descriptors, because each stream uses another one for the provider."""
    usable = DESCRIPTORS if descriptors == resource.RLIM_INFINITY else min(descriptors, DESCRIPTORS)
    return max((usable - min(RESERVED_DESCRIPTORS, usable // 4)) // 2, 1)


CONNECTION_LIMIT = ConnectionLimit(max_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def raise_connection_limit() -> None:
    """Raises the number of connections to what the hard limit of file descriptors allows."""
    CONNECTION_LIMIT.maximum = max_connections(raise_descriptor_limit())


async def sweep_connections(count: Callable[[str, int], None] | None = None, *, seconds: float = SWEEP_SECONDS) -> None:
    """Sweeps the connections every `seconds` for the life of the process.

    Calls `count` with each reason and number of closed ones.
    """
    await every(seconds, partial(_sweep, count), first=seconds)


async def _sweep(count: Callable[[str, int], None] | None) -> None:
    now = asyncio.get_running_loop().time()
    ending = [c for c in CONNECTIONS if c.is_overdue(now) or c.is_idle(now)]
    for number, connection in enumerate(ending):
        if connection.is_overdue(now):
            connection.end("overdue")
        elif connection.is_idle(now):  # again, because other tasks ran in between
            connection.close()
        if number % 50 == 49:
            await asyncio.sleep(0)  # thousands at once would delay every stream
    for reason, ended in ENDED.items():
        if count is not None:
            count(reason, ended)
    ENDED.clear()
