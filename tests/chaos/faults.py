"""Injects each fault and undoes it. Each context manager yields while its fault is in effect."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import redis
from redis.crc import key_slot

from gateway.keys import PARTITION_TAGS
from tests.chaos.books import TAKEOVERS, Disturbance
from tests.chaos.nodes import FAKETIME, Node, Servers, Slots
from tests.chaos.plan import Fault
from tests.chaos.processes import Fleet
from tests.support.s3_server import S3Server

OF_ONE_PRIMARY = {"kill primary", "kill replica", "stop primary", "fail over", "step clock"}
CLOCK_SECONDS = 30  # the largest step of a clock


class CannotHappen(Exception):
    """A requirement of the fault is missing on this machine."""


@dataclass
class Injection:
    """A fault in effect. `process`: the name of a killed process, which has to start again."""

    fault: Fault
    target: str
    begin: float
    redis: bool = False
    lossy: bool = False
    clock: bool = False
    slots: Slots | None = None
    process: str | None = None

    def to_disturbance(self, end: float = float("inf")) -> Disturbance:
        return Disturbance(
            self.fault.kind, self.target, self.begin, end, self.redis, self.lossy, self.clock, self.slots
        )


class Faults:
    def __init__(
        self,
        fleet: Fleet,
        servers: Servers,
        switch: Callable[[str], None],
        storage: S3Server | None = None,
        *,
        forgetful: bool = False,
    ) -> None:
        """`forgetful`: gateways do not wait for replicas, so a takeover may lose what they wrote."""
        self._forgetful = forgetful
        self._fleet, self._servers, self._switch, self._storage = fleet, servers, switch, storage

    @contextlib.asynccontextmanager
    async def inject(self, fault: Fault) -> AsyncIterator[Injection]:
        """Injects the fault, and undoes it at the end of the block. Raises CannotHappen if nothing was injected."""
        family = fault.kind.rpartition(" ")[2]
        match family:
            case "gateway" | "worker":
                injecting = self._inject_process_fault(fault, family)
            case "provider" | "receiver":
                injecting = self._inject_link_fault(fault, family)
            case "storage":
                injecting = self._stop_storage(fault)
            case _:
                injecting = self._inject_redis_fault(fault)
        async with injecting as injection:
            yield injection

    @contextlib.asynccontextmanager
    async def _inject_process_fault(self, fault: Fault, family: str) -> AsyncIterator[Injection]:
        kinds = ["gateway"] if family == "gateway" else ["webhooks", "monitors", "deploys", "sites"]
        candidates = [process for kind in kinds for process in self._fleet.find_by_kind(kind)]
        process = candidates[fault.chance % len(candidates)]
        killed = fault.kind.startswith("kill")
        injection = Injection(fault, process.name, time.monotonic(), process=process.name if killed else None)
        if killed:
            if fault.size < 0 and process.kill_one(fault.chance):
                injection.process = None  # the others serve meanwhile
            else:
                process.kill()
            yield injection
            return
        process.freeze()
        try:
            yield injection
            await asyncio.sleep(fault.seconds)
        finally:
            process.thaw()

    @contextlib.asynccontextmanager
    async def _inject_link_fault(self, fault: Fault, name: str) -> AsyncIterator[Injection]:
        cut = fault.kind.startswith("cut")
        injection = Injection(fault, name, time.monotonic())
        self._switch(f"{name} cut" if cut else f"{name} slow {0.3 + abs(fault.size):.2f}")
        try:
            yield injection
            await asyncio.sleep(fault.seconds / 3)
        finally:
            self._switch(f"{name} ok")

    @contextlib.asynccontextmanager
    async def _stop_storage(self, fault: Fault) -> AsyncIterator[Injection]:
        if self._storage is None or self._storage.process is None:
            raise CannotHappen("the storage is a folder")
        self._storage.process.send_signal(signal.SIGSTOP)
        try:
            yield Injection(fault, "storage", time.monotonic())
            await asyncio.sleep(fault.seconds)
        finally:
            self._storage.process.send_signal(signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def _inject_redis_fault(self, fault: Fault) -> AsyncIterator[Injection]:
        primaries = await self._servers.find_primaries()
        primary = primaries[fault.chance % len(primaries)]
        replica = await self._servers.find_replica(primary)
        injection = Injection(fault, "redis", time.monotonic(), redis=True)
        injection.lossy = self._forgetful and fault.kind in TAKEOVERS
        if fault.kind in OF_ONE_PRIMARY:
            injection.slots = await self._servers.find_slots(primary)
        match fault.kind:
            case "kill primary" | "kill replica":
                hit = primary if fault.kind == "kill primary" else replica or primary
                doing = self._kill(hit, fault)
            case "stop primary":
                doing = self._stop(primary, fault)
            case "fail over":
                doing = self._fail_over(replica)
            case "move slot":
                slot = key_slot(PARTITION_TAGS[fault.chance % 16].encode())
                injection.slots = ((slot, slot),)
                doing = self._move_slot(fault)
            case "cut redis" | "pause redis":
                doing = self._disturb_clients(fault)
            case "fill memory":
                doing = self._fill_memory(primaries, fault)
            case "fill disk":
                if not self._servers.has_disk:
                    raise CannotHappen("no file system can be mounted")
                injection.slots = await self._servers.find_slots(self._servers.nodes[0])
                doing = self._fill_disk(fault)
            case "step clock":
                if FAKETIME is None:
                    raise CannotHappen("libfaketime is not installed")
                injection.clock = True
                doing = self._step_clock(primary, fault)
            case kind:
                raise ValueError(kind)
        async with doing:
            yield injection

    @contextlib.asynccontextmanager
    async def _kill(self, node: Node, fault: Fault) -> AsyncIterator[None]:
        await asyncio.to_thread(node.kill)
        try:
            yield
            await asyncio.sleep(fault.seconds / 2)
        finally:
            await asyncio.to_thread(node.start)

    @contextlib.asynccontextmanager
    async def _stop(self, node: Node, fault: Fault) -> AsyncIterator[None]:
        node.freeze()
        try:
            yield
            await asyncio.sleep(fault.seconds)
        finally:
            node.thaw()

    @contextlib.asynccontextmanager
    async def _fail_over(self, replica: Node | None) -> AsyncIterator[None]:
        if replica is not None:
            await self._servers.fail_over(replica)
        yield
        await asyncio.sleep(1)

    @contextlib.asynccontextmanager
    async def _move_slot(self, fault: Fault) -> AsyncIterator[None]:
        yield
        await self._servers.move_slot(PARTITION_TAGS[fault.chance % 16], fault.chance // 16)

    @contextlib.asynccontextmanager
    async def _disturb_clients(self, fault: Fault) -> AsyncIterator[None]:
        for node in self._servers.nodes:
            with contextlib.suppress(redis.RedisError, OSError):
                if fault.kind == "pause redis":
                    await node.execute("CLIENT", "PAUSE", int(fault.seconds / 4 * 1000), "ALL")
                else:
                    await node.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                    await node.execute("CLIENT", "KILL", "TYPE", "pubsub")
        yield
        await asyncio.sleep(fault.seconds / 4)

    @contextlib.asynccontextmanager
    async def _fill_memory(self, primaries: list[Node], fault: Fault) -> AsyncIterator[None]:
        for node in primaries:
            await node.execute("CONFIG", "SET", "maxmemory", 1)
        try:
            yield
            await asyncio.sleep(fault.seconds / 2)
        finally:
            for node in self._servers.nodes:
                await node.execute("CONFIG", "SET", "maxmemory", 0)

    @contextlib.asynccontextmanager
    async def _fill_disk(self, fault: Fault) -> AsyncIterator[None]:
        await asyncio.to_thread(self._servers.fill_disk)
        try:
            yield
            await asyncio.sleep(fault.seconds / 2)
        finally:
            await asyncio.to_thread(self._servers.empty_disk)

    @contextlib.asynccontextmanager
    async def _step_clock(self, node: Node, fault: Fault) -> AsyncIterator[None]:
        node.step_clock(fault.size * CLOCK_SECONDS)
        try:
            yield
            await asyncio.sleep(fault.seconds)
        finally:
            node.step_clock(0)
            await asyncio.sleep(1)  # libfaketime reads the file once a second
