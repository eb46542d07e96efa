"""What the workers have before them, and which workers there are.

Nothing is found by scanning keys, so that a look costs the same whatever the number of accounts, in a cluster too: the
workers are the consumers of their streams' groups, and those live whose heartbeat does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from redis.exceptions import RedisError

from gateway.deploys import states
from gateway.events import receivers
from gateway.store import keys
from gateway.store.client import Store

STREAMS = {receivers.GROUP: receivers.STREAM, states.GROUP: states.STREAM}


class Queue(msgspec.Struct):
    """Of all partitions."""

    waiting: int = 0  # entries without their outcome
    pending: int = 0  # of those, in a worker's hands
    oldestMs: int | None = None

    def add(
        self, length: int, oldest: Sequence[tuple[str, Any]], consumers: Iterable[dict[str, Any]], now: int
    ) -> None:
        self.waiting += length
        self.pending += sum(consumer["pending"] for consumer in consumers)
        for entry, _ in oldest:
            self.oldestMs = max(self.oldestMs or 0, now - int(entry.partition("-")[0]), 0)


class Worker(msgspec.Struct):
    group: str
    name: str
    heartbeatMs: int | None  # since its last; None: it has died
    pending: int


class Backlog(msgspec.Struct):
    webhooks: Queue
    deploys: Queue
    workers: list[Worker]  # those with a heartbeat, and those that died with something in their hands
    outcomes: dict[str, int]  # of deliveries, ever

    def alive(self) -> dict[str, int]:
        groups = [worker.group for worker in self.workers if worker.heartbeatMs is not None]
        return {group: groups.count(group) for group in STREAMS}


async def look(store: Store, now: int) -> Backlog:
    """`now`: Redis's clock, ms. Raises one of store.FAULTS."""
    tags = keys.partition_tags()
    async with store.client.pipeline(transaction=False) as pipe:
        for tag in tags:
            pipe.hgetall(keys.outcomes_key(tag))
            for group, stream in STREAMS.items():
                pipe.xlen(keys.stream_key(tag, stream))
                pipe.xrange(keys.stream_key(tag, stream), count=1)
                pipe.xinfo_consumers(keys.stream_key(tag, stream), group)
        answers = iter(await pipe.execute(raise_on_error=False))
    queues = {group: Queue() for group in STREAMS}
    outcomes: dict[str, int] = {}
    pending: dict[tuple[str, str], int] = {}
    for _ in tags:
        for outcome, often in _known(next(answers)).items():
            outcomes[outcome] = outcomes.get(outcome, 0) + int(often)
        for group in STREAMS:
            length, oldest, consumers = (_known(next(answers)) for _ in range(3))
            queues[group].add(length, oldest, consumers, now)
            for consumer in consumers:
                name = (group, consumer["name"])
                pending[name] = pending.get(name, 0) + consumer["pending"]
    workers = await _workers(store, pending)
    return Backlog(queues[receivers.GROUP], queues[states.GROUP], workers, outcomes)


def _known(answer: Any) -> Any:
    """A stream or a group that no worker has made yet is an empty one; every other fault is a fault."""
    if isinstance(answer, RedisError) and str(answer).startswith(("NOGROUP", "no such key")):
        return []
    if isinstance(answer, BaseException):
        raise answer
    return answer


async def _workers(store: Store, pending: dict[tuple[str, str], int]) -> list[Worker]:
    async with store.client.pipeline(transaction=False) as pipe:
        for group, name in pending:
            pipe.pttl(keys.worker_key(group, name))
        left = await pipe.execute()
    workers = [
        Worker(group, name, keys.HEARTBEAT_SECONDS * 1000 - life if life > 0 else None, pending[group, name])
        for (group, name), life in zip(pending, left, strict=True)
    ]
    workers.sort(key=lambda worker: (worker.group, worker.name))
    return [worker for worker in workers if worker.heartbeatMs is not None or worker.pending]
