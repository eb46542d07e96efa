"""How soon everything works again: asks each gateway for a stream, and each worker's heartbeat, all the time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import redis

from gateway.cancellation import end_if_canceled
from gateway.operations.keys import HEARTBEAT_SECONDS, worker_key
from tests.chaos.nodes import Servers
from tests.chaos.prompts import prompt

PROBE = 5.0  # seconds that a probe may take
PROBES = 0.4  # seconds between the beginnings of two, of one gateway and shard
EVERY = 0.25  # seconds between two looks at Redis
NAMES = 10  # a restarted worker takes the next number until its former heartbeat has expired
GROUPS = ("webhooks", "monitors", "deploys")


@dataclass
class StoreState:
    ok: bool = True
    since: float = 0.0  # the last change
    seen: float = 0.0  # the beginning of the last look


class Recovery:
    """`callers`: for each shard, names of apps with a user's token each, so many that they stay within their rates."""

    def __init__(
        self, servers: Servers, gateways: Mapping[str, str], callers: Sequence[Sequence[tuple[str, str]]]
    ) -> None:
        self._servers, self._gateways = servers, gateways
        self._callers = [itertools.cycle(several) for several in callers]
        self.state = StoreState()
        self.outages: list[tuple[float, float]] = []  # of Redis
        self._answers: dict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=2000))
        self._renewals: dict[str, deque[list[float]]] = defaultdict(lambda: deque(maxlen=600))

    async def watch(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PROBE)
        async with (
            aiohttp.ClientSession(
                timeout=timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._watch_servers())
            tasks.create_task(self._watch_heartbeats())
            for name in self._gateways:
                for shard in range(len(self._callers)):
                    tasks.create_task(self._watch_gateway(session, name, shard))

    async def _watch_servers(self) -> None:
        while True:
            end_if_canceled()
            began = time.monotonic()
            ok = await self._servers.takes_writes()
            if ok != self.state.ok:
                if ok:
                    self.outages.append((self.state.since, began))
                self.state.ok, self.state.since = ok, time.monotonic()
            self.state.seen = began
            await asyncio.sleep(EVERY)

    async def _watch_gateway(self, session: aiohttp.ClientSession, name: str, shard: int) -> None:
        """One probe that hangs holds up no other."""
        async with asyncio.TaskGroup() as probes:
            while True:
                probes.create_task(self._probe(session, name, shard))
                await asyncio.sleep(PROBES)

    async def _probe(self, session: aiohttp.ClientSession, name: str, shard: int) -> None:
        app, token = next(self._callers[shard])
        url = f"{self._gateways[name]}/capsule/{app}/ai"
        body = json.dumps({"prompt": prompt(0), "maxTokens": 64, "stream": True})
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with session.post(url, data=body, headers=headers) as response:
                if response.status == 200:
                    self._answers[name, shard].append(time.monotonic())

    async def _watch_heartbeats(self) -> None:
        """A heartbeat's time to live tells when it was renewed."""
        while True:
            end_if_canceled()
            for group in GROUPS:
                names = [f"{socket.gethostname()}-{number}" for number in range(1, NAMES + 1)]
                renewed = []
                for name in names:
                    left = await self._time_to_live(worker_key(group, name))
                    if left > 0:
                        renewed.append(time.monotonic() - HEARTBEAT_SECONDS + left / 1000)
                self._renewals[group].append(sorted(renewed))
            await asyncio.sleep(2 * EVERY)

    async def _time_to_live(self, key: str) -> int:
        with contextlib.suppress(redis.RedisError):
            return int(await self._servers.ask("PTTL", key))
        return -2

    # -- what was seen ---------------------------------------------------------------------------------------

    async def store_recovers(self, since: float, seconds: float = 90) -> float:
        """When it had; raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not (self.state.ok and self.state.seen > since):
                await asyncio.sleep(0.05)
        return self.state.since

    async def gateway_answers(self, name: str, since: float, seconds: float) -> float | None:
        """The seconds from `since` until it has answered for every shard; None if that takes longer than `seconds`."""
        shards = [self._answers[name, shard] for shard in range(len(self._callers))]
        while True:
            first = [next((at for at in answers if at >= since), None) for answers in shards]
            found = [at for at in first if at is not None]
            if len(found) == len(shards):
                return max(found) - since
            if time.monotonic() > since + seconds:
                return None
            await asyncio.sleep(0.05)

    async def workers_beat(self, group: str, count: int, since: float, seconds: float) -> float | None:
        """The seconds from `since` until so many of them have renewed their heartbeat."""
        while True:
            for renewed in self._renewals[group]:
                new = [at for at in renewed if at >= since]
                if len(new) >= count:
                    return new[count - 1] - since
            if time.monotonic() > since + seconds:
                return None
            await asyncio.sleep(0.05)
