"""How many connections a process takes, and for how long it waits for their clients.

Connections are bounded by the descriptors of the process, so that each client's stream still finds one for the
provider. When all are taken, those that have not sent the rest of a request make room, the longest waiting first. Once
a second, `sweep_connections` closes idle connections, and aborts those that exceed a time limit.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import resource
from collections.abc import Callable
from typing import Protocol

SWEEP_SECONDS = 1.0  # between two looks for connections that exceed a limit
DESCRIPTORS = 65_536  # at most, of one process; more gains nothing on one core
RESERVED_DESCRIPTORS = 512  # for Redis, key sets, files; a quarter of them all if that is less


class Client(Protocol):
    """What this module asks of a connection (`protocol.py`)."""

    def is_waiting_for_request(self) -> bool: ...
    def precedence(self, now: float) -> tuple[bool, bool, float]: ...
    def is_overdue(self, now: float) -> bool: ...
    def is_idle(self, now: float) -> bool: ...
    def end(self, reason: str) -> None: ...
    def close(self) -> None: ...


CONNECTIONS: set[Client] = set()
ENDED: collections.Counter[str] = collections.Counter()  # since the last count, by reason


class Room:
    """How many connections this process takes."""

    def __init__(self) -> None:
        self.most = most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._none_until = 0.0  # on the loop's clock: before that, no connection can make room

    def make(self, now: float) -> bool:
        """Whether one more fits, after evicting those that wait longest for a request if need be."""
        if len(CONNECTIONS) < self.most:
            return True
        if now < self._none_until:
            return False
        waiting = [c for c in CONNECTIONS if c.is_waiting_for_request()]
        # One in a hundred at once, because finding them takes a pass over all.
        victims = heapq.nsmallest(self.most // 100 + 1, waiting, key=lambda c: c.precedence(now))
        for victim in victims:
            CONNECTIONS.discard(victim)
            victim.end("evicted")
        if not victims:
            self._none_until = now + 0.1
        return bool(victims)


def most_connections(descriptors: int) -> int:
    """Half of the descriptors beside the reserve, because each stream takes another one to the provider."""
    usable = DESCRIPTORS if descriptors == resource.RLIM_INFINITY else min(descriptors, DESCRIPTORS)
    return max((usable - min(RESERVED_DESCRIPTORS, usable // 4)) // 2, 1)


ROOM = Room()


def raise_descriptor_limit() -> None:
    """Raises the soft limit, which is 1,024 on most systems, towards the hard one. Each process calls it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass  # macOS allows less than it says; the limit that is in force counts
    ROOM.most = most_connections(soft)


async def sweep_connections(count: Callable[[str, int], None] | None = None) -> None:
    """Runs for the life of the process. `count` receives why connections were ended, and how many."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        now = loop.time()
        ending = [c for c in CONNECTIONS if c.is_overdue(now) or c.is_idle(now)]
        for number, connection in enumerate(ending):
            if connection.is_overdue(now):
                connection.end("overdue")
            elif connection.is_idle(now):  # still: others ran in between
                connection.close()
            if number % 50 == 49:
                await asyncio.sleep(0)  # thousands at once would delay every stream
        for reason, ended in ENDED.items():
            if count is not None:
                count(reason, ended)
        ENDED.clear()
