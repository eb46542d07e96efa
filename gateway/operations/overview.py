"""Whether the service is well: what the operators' page and the gauges of `/metrics` show.

The queues, the workers and Redis itself are looked at in the background, for the gauges every ten seconds, for the page
every two while somebody watches.

An account's cap is kept by the admission script. This checks it from outside: of every account whose money moved,
what is settled and reserved is read again and compared with the cap of its plan.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import msgspec
import structlog

from gateway.accounts.registry import Registry
from gateway.errors import BackboneUnavailable
from gateway.ids import now_iso
from gateway.inference.availability import Availability
from gateway.operations.backlog import look
from gateway.settings import Settings
from gateway.store import keys
from gateway.store.client import backbone
from gateway.telemetry.counters import TOTAL, TTFT, TTFT_FIELDS, Counters
from gateway.telemetry.metrics import Metrics

logger = structlog.get_logger()

INTERVAL = 10.0  # seconds between looks for the gauges
WATCH_INTERVAL = 2.0  # seconds between snapshots for the page
MINUTES = 60
TOP = 8  # accounts
BATCH = 100  # accounts whose spend is read together


class Overview:
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        availability: Availability,
        counters: Counters,
        metrics: Metrics,
    ) -> None:
        self._caps, self._registry, self._store = settings.daily_caps, registry, registry.store
        self._availability, self._counters, self._metrics = availability, counters, metrics

    # -- for the gauges --------------------------------------------------------------------------------------

    async def keep_looking(self) -> None:
        """Runs as long as the process."""
        while True:
            try:
                with backbone():
                    await self._look()
                self._metrics.redis_up.set(1)
            except BackboneUnavailable as error:
                self._metrics.redis_up.set(0)
                logger.debug("overview.waiting", error=type(error.__cause__ or error).__name__)
            self._metrics.provider_up.set(self._availability.provider_up())
            await asyncio.sleep(INTERVAL)

    async def _look(self) -> None:
        now = await self._now()
        backlog = await look(self._store, now)
        self._metrics.webhook_queue.set(backlog.webhooks.waiting)
        self._metrics.webhook_oldest.set((backlog.webhooks.oldestMs or 0) / 1000)
        self._metrics.deploy_queue.set(backlog.deploys.waiting)
        for group, alive in backlog.alive().items():
            self._metrics.workers.labels(group).set(alive)
        await self._check_caps(now)

    async def _check_caps(self, now: int) -> None:
        moved, day = sorted(self._counters.spenders), day_of(now)
        for first in range(0, len(moved), BATCH):
            batch = moved[first : first + BATCH]
            spends = await self._spends(batch, day)
            self._counters.spenders.difference_update(batch)
            for spend in spends:
                if spend["settled"] + spend["reserved"] > spend["cap"]:
                    self._metrics.cap_breaches.inc()
                    logger.error("cap.breached", **spend)

    async def _spends(self, accounts: Sequence[str], day: str) -> list[dict[str, Any]]:
        """Those that still exist, in this order; nano-euro."""
        async with self._store.client.pipeline(transaction=False) as pipe:
            for account in accounts:
                pipe.hmget(keys.spend_key(account, day), ["settled", "reserved"])
            spent = await pipe.execute()
        found = []
        for account, (settled, reserved) in zip(accounts, spent, strict=True):
            if (record := await self._registry.account(account)) is not None:
                shown = {"account": account, "name": record.name, "plan": record.plan, "cap": self._caps[record.plan]}
                found.append({**shown, "settled": int(settled or 0), "reserved": int(reserved or 0)})
        return found

    async def _now(self) -> int:
        """Redis's clock, ms."""
        seconds, microseconds = await self._store.client.time()
        return int(seconds * 1000 + microseconds // 1000)

    # -- for the page ----------------------------------------------------------------------------------------

    async def snapshot(self) -> dict[str, Any]:
        """Raises BackboneUnavailable."""
        with backbone():
            now = await self._now()
            backlog, minutes, day = await look(self._store, now), await self._minutes(now), day_of(now)
            top = await self._store.client.zrevrange(keys.spenders_key(day), 0, TOP, withscores=True)
            return {
                "at": now_iso(),
                "inference": self._availability.describe(self._availability.status()),
                "gateways": await self._processes(),
                "minutes": [{"minute": f"{minute}:00.000Z", **told(counts)} for minute, counts in minutes],
                "firstToken": {
                    "p50": quantile(histogram(counts for _, counts in minutes), 0.5),
                    "p99": quantile(histogram(counts for _, counts in minutes), 0.99),
                },
                "spend": {
                    "day": day,
                    "total": next((int(spent) for account, spent in top if account == TOTAL), 0),
                    "top": await self._spends([account for account, _ in top if account != TOTAL], day),
                },
                **msgspec.to_builtins(backlog),
                "redis": await self._redis(),
            }

    async def _minutes(self, now: int) -> list[tuple[str, dict[str, str]]]:
        """Of the last hour, oldest first; the last is the present one."""
        moments = (time.gmtime(now // 1000 - 60 * ago) for ago in reversed(range(MINUTES)))
        names = [time.strftime("%Y-%m-%dT%H:%M", moment) for moment in moments]
        async with self._store.client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(keys.minute_key(name))
            return list(zip(names, await pipe.execute(), strict=True))

    async def _processes(self) -> list[dict[str, Any]]:
        found = []
        for process in sorted(await self._store.client.smembers(keys.PROCESSES)):
            life = await self._store.client.hgetall(keys.process_key(process))
            if life:
                found.append({"id": process, **life, "streams": int(life["streams"])})
            else:  # it died; if not, it is here again in two seconds
                await self._store.client.srem(keys.PROCESSES, process)
        return found

    async def _redis(self) -> dict[str, Any]:
        began = time.perf_counter()
        await self._store.client.ping()
        latency = (time.perf_counter() - began) * 1000
        nodes = await self._store.info()
        return {
            "latencyMs": round(latency, 2),
            "memory": sum(node["used_memory"] for node in nodes),
            "memoryLimit": sum(node.get("maxmemory", 0) for node in nodes),
            "clients": sum(node["connected_clients"] for node in nodes),
            "commandsPerSecond": sum(node["instantaneous_ops_per_sec"] for node in nodes),
        }


class Watch:
    """One snapshot every two seconds serves everybody who watches in this process; without them none is taken."""

    def __init__(self, overview: Overview) -> None:
        self._overview = overview
        self._looking: asyncio.Task[None] | None = None
        self._last = b""
        self._next: asyncio.Future[bytes]
        self.viewers = 0

    async def events(self) -> AsyncGenerator[bytes]:
        """For one viewer; whoever is too slow for a snapshot gets the one after it."""
        if self._looking is None:
            self._last, self._next = b"", asyncio.get_running_loop().create_future()
            self._looking = asyncio.create_task(self._keep_looking())
        self.viewers += 1
        try:
            if self._last:
                yield self._last
            while True:
                yield await asyncio.shield(self._next)
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._looking.cancel()
                self._looking = None

    async def _keep_looking(self) -> None:
        while True:
            try:
                self._last = b"data: " + msgspec.json.encode(await self._overview.snapshot()) + b"\n\n"
            except BackboneUnavailable:
                self._last = b"event: away\ndata: {}\n\n"
            told, self._next = self._next, asyncio.get_running_loop().create_future()
            told.set_result(self._last)
            await asyncio.sleep(WATCH_INTERVAL)


def day_of(now: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(now // 1000))


def told(counts: dict[str, str]) -> dict[str, Any]:
    codes = {name.removeprefix("code:"): int(n) for name, n in counts.items() if name.startswith("code:")}
    return {"requests": int(counts.get("requests", 0)), "streams": int(counts.get("streams", 0)), "codes": codes}


def histogram(minutes: Iterable[dict[str, str]]) -> list[int]:
    """Streams by their bucket of TTFT."""
    sums = [0] * len(TTFT_FIELDS)
    for counts in minutes:
        for n, field in enumerate(TTFT_FIELDS):
            sums[n] += int(counts.get(field, 0))
    return sums


def quantile(counts: Sequence[int], q: float) -> int | None:
    """Milliseconds, as if times were spread evenly in their bucket; above the last one, its lower end."""
    rank = q * sum(counts)
    if not rank:
        return None
    below = 0
    for lower, upper, count in zip((0, *TTFT), TTFT, counts, strict=False):
        if count and below + count >= rank:
            return round(lower + (upper - lower) * (rank - below) / count)
        below += count
    return TTFT[-1]
