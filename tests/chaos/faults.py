"""Plans the faults of a run from its seed alone, injects each and undoes it.

A step has one fault, or two of different families at once. The plan chooses the target of a fault as a number ("the
third primary"), which is mapped to a process when the fault is injected, because a failover changes the roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import time
from asyncio import to_thread
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis
from redis.crc import key_slot

from gateway.keys import PARTITION_TAGS
from tests.chaos.books import Disturbance
from tests.chaos.nodes import Cluster, Fleet

OF_ONE_PRIMARY = {"kill primary", "kill replica", "stop primary", "fail over"}
# Kinds of faults by the part that they hit.
FAMILIES = {
    "gateway": ("kill gateway", "stop gateway"),
    "worker": ("kill worker", "stop worker"),
    "redis": ("kill primary", "kill replica", "stop primary", "fail over", "move slot", "cut redis"),
    "network": ("cut provider", "slow provider", "cut receiver", "slow receiver"),
}
WEIGHTS = {"gateway": 2, "worker": 2, "redis": 5, "network": 2}


@dataclass(frozen=True)
class Fault:
    kind: str
    chance: int  # chooses the target among the possible ones
    seconds: float  # until the fault is undone
    size: float  # from -1 to 1, such as the share of the longest delay


@dataclass(frozen=True)
class Step:
    faults: tuple[Fault, ...]
    pause: float  # seconds between the recovery and the next step


def plan_steps(seed: int, scale: float = 1.0) -> Iterator[Step]:
    """Yields steps without end. `scale`: factor of all durations."""
    chance = random.Random(seed)
    bags: dict[str, list[str]] = {}
    while True:
        count = 2 if chance.random() < 0.3 else 1
        families = [*FAMILIES]
        faults = []
        for _ in range(count):
            family = chance.choices(families, [WEIGHTS[name] for name in families])[0]
            families.remove(family)
            faults.append(
                Fault(
                    _next_kind(bags.setdefault(family, []), FAMILIES[family], chance),
                    chance.randrange(1_000_000),
                    round(chance.uniform(5, 20) * scale, 2),
                    round(chance.uniform(-1, 1), 3),
                )
            )
        yield Step(tuple(faults), round(chance.uniform(3, 8) * scale, 2))


def _next_kind(bag: list[str], kinds: Sequence[str], chance: random.Random) -> str:
    """Draws each kind of a family once before any kind comes again, so that a short run has many kinds."""
    if not bag:
        bag += chance.sample(kinds, len(kinds))
    return bag.pop()


class Faults:
    def __init__(self, fleet: Fleet, servers: Cluster, switch: Callable[[str], None]) -> None:
        self._fleet, self._servers, self._switch = fleet, servers, switch

    @contextlib.asynccontextmanager
    async def inject(self, fault: Fault) -> AsyncIterator[Disturbance]:
        """Injects the fault, and undoes it at the end of the block."""
        family = fault.kind.rpartition(" ")[2]
        match family:
            case "gateway" | "worker":
                injecting = self._inject_process_fault(fault, family)
            case "provider" | "receiver":
                cut = fault.kind.startswith("cut")
                begin, end = f"{family} cut" if cut else f"{family} slow {0.3 + abs(fault.size):.2f}", f"{family} ok"
                disturbance = Disturbance(fault.kind, family, time.monotonic())
                injecting = _lasting(
                    disturbance, fault.seconds / 3, partial(self._switch, begin), partial(self._switch, end)
                )
            case _:
                injecting = await self._inject_redis_fault(fault)
        async with injecting as disturbance:
            yield disturbance

    def _inject_process_fault(self, fault: Fault, family: str) -> AbstractAsyncContextManager[Disturbance]:
        kinds = ["gateway"] if family == "gateway" else ["webhooks", "monitors", "deploys", "sites"]
        candidates = [process for kind in kinds for process in self._fleet.find_by_kind(kind)]
        process = candidates[fault.chance % len(candidates)]
        disturbance = Disturbance(fault.kind, process.name, time.monotonic())
        if not fault.kind.startswith("kill"):
            return _lasting(disturbance, fault.seconds, process.freeze, process.thaw)
        process.kill()
        disturbance.process = process.name
        return _lasting(disturbance, 0)

    async def _inject_redis_fault(self, fault: Fault) -> AbstractAsyncContextManager[Disturbance]:
        servers = self._servers
        primaries = await servers.find_primaries()
        primary = primaries[fault.chance % len(primaries)]
        replica = await servers.find_replica(primary)
        disturbance = Disturbance(fault.kind, "redis", time.monotonic(), redis=True)
        if fault.kind in OF_ONE_PRIMARY:
            disturbance.slots = await servers.find_slots(primary)
        lasting = partial(_lasting, disturbance)
        match fault.kind:
            case "kill primary" | "kill replica":
                node = primary if fault.kind == "kill primary" else replica or primary
                return lasting(fault.seconds / 2, partial(to_thread, node.kill), partial(to_thread, node.start))
            case "stop primary":
                return lasting(fault.seconds, primary.freeze, primary.thaw)
            case "fail over":
                return lasting(1, partial(replica.execute, "CLUSTER FAILOVER") if replica is not None else _do_nothing)
            case "move slot":
                tag = PARTITION_TAGS[fault.chance % 16]
                slot = key_slot(tag.encode())
                disturbance.slots = ((slot, slot),)
                return self._move_slot(disturbance, tag, fault.chance // 16)
            case "cut redis":
                return lasting(fault.seconds / 4, self._cut_clients)
            case kind:
                raise ValueError(kind)

    @contextlib.asynccontextmanager
    async def _move_slot(self, disturbance: Disturbance, tag: str, chance: int) -> AsyncIterator[Disturbance]:
        yield disturbance
        await self._servers.move_slot(tag, chance)

    async def _cut_clients(self) -> None:
        for node in self._servers.nodes:
            with contextlib.suppress(redis.RedisError, OSError):
                await node.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                await node.execute("CLIENT", "KILL", "TYPE", "pubsub")


def _do_nothing() -> None:
    pass


@contextlib.asynccontextmanager
async def _lasting(
    disturbance: Disturbance, seconds: float, do: Callable[[], Any] = _do_nothing, undo: Callable[[], Any] = _do_nothing
) -> AsyncIterator[Disturbance]:
    """A fault that lasts some seconds. Both functions may be coroutine functions."""
    await _call(do)
    try:
        yield disturbance
        await asyncio.sleep(seconds)
    finally:
        await _call(undo)


async def _call(function: Callable[[], Any]) -> None:
    if inspect.isawaitable(pending := function()):
        await pending
