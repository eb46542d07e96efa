"""Measures how soon everything works again, by requesting streams from each gateway."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from gateway.cancellation import end_if_canceled
from tests.chaos.nodes import Cluster
from tests.chaos.prompts import make_prompt

PROBE_SECONDS = 5.0  # timeout of a probe
PROBE_INTERVAL_SECONDS = 0.4  # for each gateway and shard
CHECK_INTERVAL_SECONDS = 0.25  # of Redis


@dataclass
class StoreState:
    ok: bool = True
    since: float = 0.0  # when `ok` changed last
    seen: float = 0.0  # when the last check began


class Recovery:
    """A prober of the service. `callers`: the names and user tokens of each shard's apps.

    There are enough apps that their probes stay within the rate limits.
    """

    def __init__(
        self, servers: Cluster, gateways: Mapping[str, str], callers: Sequence[Sequence[tuple[str, str]]]
    ) -> None:
        self._servers, self._gateways = servers, gateways
        self._callers = [itertools.cycle(several) for several in callers]
        self.state = StoreState()
        self._answers: dict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=2000))

    async def watch(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS)
        async with (
            aiohttp.ClientSession(
                timeout=timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._watch_servers())
            for name in self._gateways:
                for shard in range(len(self._callers)):
                    tasks.create_task(self._watch_gateway(session, name, shard))

    async def _watch_servers(self) -> None:
        while True:
            end_if_canceled()
            began = time.monotonic()
            ok = await self._servers.takes_writes()
            if ok != self.state.ok:
                self.state.ok, self.state.since = ok, time.monotonic()
            self.state.seen = began
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)

    async def _watch_gateway(self, session: aiohttp.ClientSession, name: str, shard: int) -> None:
        """Starts a probe at each interval. A probe that hangs does not delay the next."""
        async with asyncio.TaskGroup() as probes:
            while True:
                probes.create_task(self._probe(session, name, shard))
                await asyncio.sleep(PROBE_INTERVAL_SECONDS)

    async def _probe(self, session: aiohttp.ClientSession, name: str, shard: int) -> None:
        app, token = next(self._callers[shard])
        url = f"{self._gateways[name]}/capsule/{app}/ai"
        body = json.dumps({"prompt": make_prompt(0), "maxTokens": 64, "stream": True})
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with session.post(url, data=body, headers=headers) as response:
                if response.status == 200:
                    self._answers[name, shard].append(time.monotonic())

    # -- measurements ----------------------------------------------------------------------------------------

    async def wait_for_redis(self, since: float, seconds: float = 90) -> float:
        """Waits until Redis works, and returns when it began to. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not (self.state.ok and self.state.seen > since):
                await asyncio.sleep(0.05)
        return self.state.since

    async def measure_gateway(self, name: str, since: float, seconds: float) -> float | None:
        """Returns the seconds from `since` until the gateway has answered for every shard; None if above `seconds`."""
        shards = [self._answers[name, shard] for shard in range(len(self._callers))]
        while True:
            first = [next((at for at in answers if at >= since), None) for answers in shards]
            found = [at for at in first if at is not None]
            if len(found) == len(shards):
                return max(found) - since
            if time.monotonic() > since + seconds:
                return None
            await asyncio.sleep(0.05)
