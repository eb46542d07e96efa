"""Several `Permits` on a real Valkey, each as one process, and a provider that counts what it serves."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.inference.concurrency.permits import Permit, Permits
from gateway.redis.client import Store
from tests.support.polling import wait_until


class Provider:
    """Counts the requests that are served at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.busy = 0.0  # permit-seconds in use
        self._since = time.monotonic()

    def _change(self, by: int) -> None:
        now = time.monotonic()
        self.busy += self.now * (now - self._since)
        self._since = now
        self.now += by
        self.most = max(self.most, self.now)

    async def serve(self, permits: Permits, permit: Permit, seconds: float) -> None:
        self._change(1)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._change(-1)
            permits.release(permit)

    async def request(self, permits: Permits, account: str, seconds: float, app: str = "app") -> float:
        """Seconds of waiting."""
        began = time.monotonic()
        permit = permits.take_now(account) or await permits.wait(account, app, 1)
        waited = time.monotonic() - began
        await self.serve(permits, permit, seconds)
        return waited


class Cluster:
    """Processes that a test starts, kills and stops."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.running: dict[Permits, tuple[asyncio.Task[None], Store]] = {}

    def start(self, **options: Any) -> Permits:
        store = Store(self.url)
        permits = Permits(store, **{"bound": 10, "patience": 10.0, **options})
        self.running[permits] = (asyncio.create_task(permits.run()), store)
        return permits

    async def kill(self, permits: Permits) -> None:
        task, store = self.running.pop(permits)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()

    async def stop(self, permits: Permits) -> None:
        task, _ = self.running[permits]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await permits.close()
        await self.kill(permits)

    def calls(self, permits: Permits) -> list[float]:
        """When the process called the script from now on."""
        store, called = self.running[permits][1], []
        run = store.run_script

        async def count(*args: Any) -> Any:
            called.append(time.monotonic())
            return await run(*args)

        store.run_script = count  # type: ignore[method-assign]
        return called


@pytest.fixture
async def cluster(redis_url: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(redis_url)
    yield cluster
    for permits in [*cluster.running]:
        await cluster.kill(permits)


async def take(permits: Permits, count: int, account: str = "acc") -> list[Permit]:
    return [permits.take_now(account) or await permits.wait(account, "app", 1) for _ in range(count)]


async def ready(permits: Permits) -> None:
    await wait_until(lambda: permits._lease.spare >= permits._low > 0)
