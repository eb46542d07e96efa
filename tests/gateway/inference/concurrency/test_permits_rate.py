"""The provider's quota of any minute, shared by several processes in virtual time.

test_permits_handler.py shows how callers experience it.
"""

import asyncio
import collections
import random

import pytest
from redis.crc import key_slot

from gateway.errors import ProviderQuotaExhausted
from gateway.settings import ProviderRate
from tests.gateway.inference.permit_processes import (
    Process,
    Quota,
    SimulatedRedis,
    now,
    real_processes,
)
from tests.support.background import cancel
from tests.support.polling import wait_until
from tests.support.redis_servers import replicated_cluster
from tests.support.virtual_time import virtual_time

SHORT_WINDOW = 1.5  # seconds, in real time


@virtual_time
async def test_any_minute_is_within_the_quota_and_the_quota_is_used(simulated: SimulatedRedis) -> None:
    rate, quota, seconds = ProviderRate(requests=60), Quota(), 130
    processes = [simulated.start(limit=1000, rate=rate, max_wait=120) for _ in range(3)]
    end = now() + seconds

    async def ask(permits: Process, account: str) -> None:
        while now() < end:
            await quota.request(permits, account, random.uniform(0, 12))

    await asyncio.gather(*(ask(p, f"acc{n}") for p in processes for n in range(5)))
    assert quota.most() <= 60
    assert len(quota.starts) > 0.9 * 60 * seconds / quota.window


@virtual_time
async def test_tokens_of_any_minute_are_within_the_quota(simulated: SimulatedRedis) -> None:
    rate, quota = ProviderRate(tokens=100_000), Quota()
    processes = [simulated.start(limit=1000, rate=rate, max_wait=120) for _ in range(2)]
    end = now() + 130

    async def ask(permits: Process, account: str) -> None:
        while now() < end:
            tokens = random.randrange(500, 20_000)
            await quota.request(permits, account, random.uniform(0, 8), tokens, random.randrange(tokens // 4))

    await asyncio.gather(*(ask(p, f"acc{n}") for p in processes for n in range(3)))
    assert quota.most_tokens() <= 100_000
    assert len(quota.starts) > 90, "with all reserved tokens spent they would be 26"


@virtual_time
async def test_a_flood_does_not_reduce_the_share_of_others(simulated: SimulatedRedis) -> None:
    rate, quota = ProviderRate(requests=60), Quota()
    processes = [simulated.start(limit=1000, rate=rate, max_wait=120) for _ in range(3)]
    for _ in range(60):  # from then on, one request becomes free every second
        await quota.request(processes[0], "first")
        await asyncio.sleep(1)

    async def ask(permits: Process, account: str) -> None:
        while True:
            try:
                await quota.request(permits, account)
            except ProviderQuotaExhausted:
                await asyncio.sleep(2)

    flood = [ask(p, "flood") for p in processes for _ in range(22)]
    others = [ask(p, "other") for p in processes for _ in range(8)]
    await asyncio.wait(map(asyncio.create_task, [*flood, *others]), timeout=100)
    counts = collections.Counter(account for _, account in quota.starts)
    assert counts["other"] == pytest.approx(counts["flood"], abs=2)
    assert quota.most() <= 60


@virtual_time
async def test_waits_for_the_quota_have_a_true_retry_after(simulated: SimulatedRedis) -> None:
    permits = simulated.start(limit=1000, rate=ProviderRate(requests=10), max_wait=1)
    quota, began = Quota(), now()
    await asyncio.gather(*(quota.request(permits, "acc") for _ in range(10)))
    with pytest.raises(ProviderQuotaExhausted) as refusal:
        await quota.request(permits, "acc")
    at = now()
    while len(quota.starts) == 10:
        try:
            await quota.request(permits, "acc")
        except ProviderQuotaExhausted:
            continue
    frees_at = quota.starts[-1][0]
    assert 60 <= frees_at - began < 62
    assert refusal.value.retry_after == pytest.approx(frees_at - at, abs=1.5)


@virtual_time
async def test_a_quota_without_a_limit_of_permits(simulated: SimulatedRedis) -> None:
    permits, quota = simulated.start(limit=0, rate=ProviderRate(requests=200)), Quota()
    asks = [asyncio.create_task(quota.request(permits, f"acc{n % 50}", 5.0)) for n in range(300)]
    await asyncio.sleep(3)
    assert (len(quota.starts), permits.used, permits.in_force) == (200, 200, 0)
    await cancel(*asks)


@pytest.mark.long
async def test_the_limit_and_the_quota_hold_across_a_failover() -> None:
    """One node of Redis Cluster has all permits, and its replica may lack the last calls.

    Each process reports again what it was granted and has spent.
    """
    with replicated_cluster() as servers:
        cluster, rate, quota = real_processes(servers.url), ProviderRate(requests=40), Quota(SHORT_WINDOW)
        processes = [cluster.start(limit=12, rate=rate, window=SHORT_WINDOW) for _ in range(3)]
        stopping = False

        async def ask(permits: Process, account: str) -> None:
            while not stopping:
                await quota.request(permits, account)

        tasks = [asyncio.create_task(ask(p, f"acc{n}")) for p in processes for n in range(8)]
        await wait_until(lambda: len(quota.starts) > 60, timeout=10)
        node = servers.owner(key_slot(b"provider"))
        servers.primaries[node].kill()
        await asyncio.to_thread(servers.fail_over, node)
        before = len(quota.starts)
        await wait_until(lambda: len(quota.starts) > before + 80, timeout=20)
        stopping = True
        await asyncio.gather(*tasks)
        await cluster.kill_all()
        assert quota.most() <= 40
        assert quota.most_running <= 12
