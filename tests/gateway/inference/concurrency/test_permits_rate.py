"""The provider's quota of any minute, shared by several processes in virtual time.

test_permits_handler.py shows how callers experience it.
"""

import asyncio
import collections
import contextlib
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


RATES = [ProviderRate(requests=40), ProviderRate(tokens=60_000), ProviderRate(40, 60_000)]


@virtual_time
async def test_any_minute_is_within_the_quota_and_the_quota_is_used(simulated: SimulatedRedis) -> None:
    """With all reserved tokens spent, half as many requests would pass."""
    quota, rate = Quota(), ProviderRate(40, 60_000)
    await use_for(120, [simulated.start(limit=1000, rate=rate, max_wait=120) for _ in range(3)], quota)
    assert quota.most() <= rate.requests
    assert quota.most_tokens() <= rate.tokens
    assert len(quota.starts) > 40


async def use_for(seconds: float, living: list[Process], quota: Quota) -> None:
    """Makes requests of nine accounts at any of the processes, which may change meanwhile."""
    end = now() + seconds

    async def ask(account: str) -> None:
        while now() < end:
            tokens = random.randrange(500, 8_000)
            with contextlib.suppress(ProviderQuotaExhausted):
                permits = random.choice(living)
                await quota.request(permits, account, random.uniform(0, 12), tokens, random.randrange(tokens // 4))

    await asyncio.gather(*(ask(f"acc{n}") for n in range(9)))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 9))])
@virtual_time
async def test_faults_exceed_no_quota(simulated: SimulatedRedis, seed: int) -> None:
    """Processes die or stop, messages are lost, and Redis stands still for longer than a lease lasts."""
    random.seed(seed)
    rate, quota = random.choice(RATES), Quota()

    def start() -> Process:
        return simulated.start(limit=1000, rate=rate, max_wait=20)

    living = [start() for _ in range(3)]
    using = asyncio.create_task(use_for(150, living, quota))
    while not using.done():
        await asyncio.sleep(random.uniform(0, 20))
        match random.choice(["die", "stop", "lose", "freeze"]):
            case "die" | "stop" as way:
                ended, living[0] = living[0], start()
                random.shuffle(living)
                await (simulated.kill(ended) if way == "die" else simulated.stop(ended))
            case "lose":
                simulated.loses_messages = not simulated.loses_messages
            case "freeze":
                simulated.freeze()
                await asyncio.sleep(random.uniform(0, 40))
                simulated.thaw()
    await using
    assert not rate.requests or quota.most() <= rate.requests
    assert not rate.tokens or quota.most_tokens() <= rate.tokens
    assert len(quota.starts) > 20


@pytest.mark.parametrize("way", ["die", "stop"])
@virtual_time
async def test_what_a_process_held_when_it_ended_counts_as_spent_for_a_minute(
    simulated: SimulatedRedis, way: str
) -> None:
    one, two = (simulated.start(limit=1000, rate=ProviderRate(tokens=10_000), max_wait=200) for _ in range(2))
    assert await one.wait_for_permit("a", "app", 1, 6_000)
    await asyncio.sleep(1)
    await (simulated.kill(one) if way == "die" else simulated.stop(one))
    ended = now() + (28 if way == "die" else 0)
    await two.wait_for_permit("b", "app", 1, 6_000)
    assert 57 < now() - ended < 63


@virtual_time
async def test_after_a_loss_of_data_the_quota_counts_as_spent(simulated: SimulatedRedis) -> None:
    """Nobody reports what a process had sent that has died."""
    one, two = (simulated.start(limit=1000, rate=ProviderRate(requests=6), max_wait=200) for _ in range(2))
    quota = Quota()
    await asyncio.gather(quota.request(two, "acc"), *(quota.request(one, "acc") for _ in range(5)))
    await asyncio.sleep(1)
    await simulated.kill(one)
    simulated.client.flushall()
    await asyncio.gather(*(quota.request(two, "acc") for _ in range(5)))
    assert quota.most() <= 6


@virtual_time
async def test_a_request_that_needs_many_tokens_stays_first(simulated: SimulatedRedis) -> None:
    """And nothing is spare while it waits."""
    one, two = (simulated.start(limit=1000, rate=ProviderRate(tokens=10_000), max_wait=120) for _ in range(2))
    held = [await one.wait_for_permit("small", "app", 1, 2_000) for _ in range(4)]
    large = asyncio.create_task(two.wait_for_permit("large", "app", 1, 9_000))
    await asyncio.sleep(1)
    small = asyncio.create_task(one.wait_for_permit("small", "app", 1, 2_000))
    await asyncio.sleep(1)
    assert (one.take_now("small", 2_000), small.done(), large.done()) == (None, False, False)
    for permit in held:
        one.release(permit, served=False)
    await asyncio.sleep(1)
    assert (small.done(), large.done()) == (False, True)
    two.release(await large, served=False)
    assert await small


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
