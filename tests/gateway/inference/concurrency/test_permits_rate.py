"""The provider's quota of any minute over several processes, with a shorter minute.

How callers meet it is in test_permits_handler.py.
"""

import asyncio
import collections
import random
import time

import pytest
from redis.crc import key_slot

from gateway.errors import ProviderQuotaExhausted, ProviderRefused
from gateway.inference.concurrency.permits import Permits
from gateway.settings import ProviderRate
from tests.gateway.inference.permit_processes import Cluster, cluster, ready
from tests.support.polling import wait_until
from tests.support.redis_servers import replicated_cluster

__all__ = ["cluster"]

WINDOW = 1.5  # seconds


class Quota:
    """Counts what started in any window: requests and the tokens that they used."""

    def __init__(self, window: float = WINDOW) -> None:
        self.window = window
        self.starts: list[tuple[float, str]] = []
        self.uses: list[list[float]] = []  # when, and tokens: those reserved until the request has ended

    def most(self) -> int:
        """Requests of the fullest window."""
        times = [at for at, _ in self.starts]
        return max(sum(at < each < at + self.window for each in times) + 1 for at in times)

    def most_tokens(self) -> float:
        return max(sum(n for at, n in self.uses if first <= at < first + self.window) for first, _ in self.uses)

    async def request(
        self, permits: Permits, account: str, seconds: float = 0.01, tokens: int = 0, used: int = 0
    ) -> None:
        permit = permits.take_now(account, tokens) or await permits.wait(account, "app", 1, tokens)
        now = time.monotonic()
        self.starts.append((now, account))
        use: list[float] = [now, tokens]
        self.uses.append(use)
        permits.mark_sent(permit)
        await asyncio.sleep(seconds)
        use[1] = used
        permits.release(permit, tokens=used)


# -- several processes -----------------------------------------------------------------------------------------


async def test_any_minute_is_within_the_quota_and_the_quota_is_used(cluster: Cluster) -> None:
    rate, quota, seconds = ProviderRate(requests=45), Quota(), 6.0
    processes = [cluster.start(bound=1000, rate=rate, window=WINDOW) for _ in range(5)]
    end = time.monotonic() + seconds

    async def ask(permits: Permits, account: str) -> None:
        while time.monotonic() < end:
            await quota.request(permits, account, random.uniform(0, 0.3))

    await asyncio.gather(*(ask(p, f"acc{n}") for p in processes for n in range(8)))
    assert quota.most() <= 45
    assert len(quota.starts) > 0.75 * 45 * seconds / WINDOW


async def test_tokens_of_any_minute_are_within_the_quota(cluster: Cluster) -> None:
    rate, quota = ProviderRate(tokens=100_000), Quota()
    processes = [cluster.start(bound=1000, rate=rate, window=WINDOW) for _ in range(3)]
    end = time.monotonic() + 5

    async def ask(permits: Permits, account: str) -> None:
        while time.monotonic() < end:
            most = random.randrange(500, 20_000)
            await quota.request(permits, account, random.uniform(0, 0.2), most, random.randrange(most // 4))

    await asyncio.gather(*(ask(p, f"acc{n}") for p in processes for n in range(5)))
    assert quota.most_tokens() <= 100_000
    # Reserved at first they would be 50 in the time; most of what is reserved comes back.
    assert len(quota.starts) > 80


async def test_a_dead_processes_share_is_counted_as_used(cluster: Cluster) -> None:
    """All its spare budget might have been used until its lease ended."""
    rate, quota = ProviderRate(requests=30), Quota()
    options = {"bound": 1000, "rate": rate, "window": WINDOW, "lease": 1.2, "renewal": 0.2}
    one, two = cluster.start(**options), cluster.start(**options)
    await ready(one)
    for _ in range(4):
        await quota.request(one, "a")
    await cluster.kill(one)
    end = time.monotonic() + 4

    async def ask(n: int) -> None:
        while time.monotonic() < end:
            await quota.request(two, f"acc{n}")

    await asyncio.gather(*map(ask, range(10)))
    assert quota.most() <= 30
    late = [at for at, _ in quota.starts if at > end - WINDOW - 0.2]
    assert len(late) >= 30 * 0.75, "its share is free again"


async def test_a_flood_does_not_take_the_others_turns(cluster: Cluster) -> None:
    rate, quota = ProviderRate(requests=40), Quota()
    processes = [cluster.start(bound=1000, rate=rate, window=WINDOW, patience=30.0) for _ in range(3)]
    end = time.monotonic() + 6

    async def ask(permits: Permits, account: str) -> None:
        while time.monotonic() < end:
            try:
                await quota.request(permits, account)
            except ProviderQuotaExhausted:
                await asyncio.sleep(0.05)

    flood = [ask(p, "flood") for p in processes for _ in range(30)]
    await asyncio.gather(*flood, *(ask(p, "other") for p in processes for _ in range(12)))
    counts = collections.Counter(account for at, account in quota.starts if at > end - 4)
    assert counts["other"] / counts["flood"] == pytest.approx(1, rel=0.25)
    assert quota.most() <= 40


async def test_an_uncontended_request_calls_nothing(cluster: Cluster) -> None:
    permits = cluster.start(bound=100, rate=ProviderRate(requests=100_000, tokens=100_000_000))
    await ready(permits)
    called = cluster.calls(permits)
    for n in range(400):
        permit = permits.take_now("acc", 2_000)
        assert permit, n
        permits.release(permit, tokens=300)
        await asyncio.sleep(0.005)
    assert len(called) <= 2 + 400 * 0.006 / 0.05  # top-ups, beside the requests


async def test_waits_for_the_quota_have_a_true_retry_after(cluster: Cluster) -> None:
    permits = cluster.start(bound=1000, rate=ProviderRate(requests=10), window=4.0, patience=0.3)
    quota, began = Quota(), time.monotonic()
    await asyncio.gather(*(quota.request(permits, "acc") for _ in range(10)))
    with pytest.raises(ProviderQuotaExhausted) as refusal:
        await quota.request(permits, "acc")
    at = time.monotonic()
    assert refusal.value.retry_after
    while len(quota.starts) == 10:
        try:
            await quota.request(permits, "acc")
        except ProviderQuotaExhausted:
            continue
    frees = quota.starts[-1][0]
    assert 3.9 <= frees - began < 6
    assert frees - at - 0.5 <= refusal.value.retry_after <= frees - at + 1.5


async def test_a_request_beyond_the_whole_quota_is_refused_at_once(cluster: Cluster) -> None:
    permits = cluster.start(rate=ProviderRate(tokens=1_000))
    with pytest.raises(ProviderRefused):
        permits.join("acc", "app", 1, 1_001)
    assert await asyncio.wait_for(permits.wait("acc", "app", 1, 1_000), 2)


async def test_a_request_that_was_not_sent_uses_nothing(cluster: Cluster) -> None:
    permits = cluster.start(rate=ProviderRate(requests=20, tokens=100_000))
    await ready(permits)
    for _ in range(200):
        permit = permits.take_now("acc", 2_000)
        assert permit
        permits.release(permit, served=False)
    assert permits._budget
    assert permits._budget.requests.spent == permits._budget.tokens.spent == 0


async def test_a_quota_without_a_bound(cluster: Cluster) -> None:
    permits, quota = cluster.start(bound=0, rate=ProviderRate(requests=200)), Quota(60)
    asks = [asyncio.create_task(quota.request(permits, f"acc{n % 50}", 5.0)) for n in range(300)]
    await wait_until(lambda: len(quota.starts) == 200)
    await asyncio.sleep(0.3)
    assert (len(quota.starts), permits.used, permits.in_force) == (200, 200, 0)
    for ask in asks:
        ask.cancel()
    await asyncio.gather(*asks, return_exceptions=True)


async def test_leaving_takes_no_budget_along(cluster: Cluster) -> None:
    one, two = (cluster.start(bound=100, rate=ProviderRate(requests=20), window=60.0) for _ in range(2))
    quota = Quota(60)
    await ready(one)
    await ready(two)
    for _ in range(10):
        turns = [p.join(f"acc{n}", "app", 1) for p in (one, two) for n in range(20)]
        await asyncio.sleep(random.uniform(0, 0.002))
        for turn in turns:
            turn.leave(ConnectionError())
        await asyncio.sleep(0.01)
        for turn in turns:
            if turn._future.exception() is None:
                (one if turn._permits is one else two).release(turn._future.result(), served=False)
    used = sum(p._budget.requests.spent for p in (one, two) if p._budget)
    for _ in range(20 - used):
        await asyncio.wait_for(quota.request(one, "acc"), 3)


async def test_the_quota_holds_over_a_failover() -> None:
    """A replica may lack the last calls: each process says again what it was granted and has spent."""
    with replicated_cluster() as servers:
        cluster, rate, quota = Cluster(servers.url), ProviderRate(requests=40), Quota()
        processes = [cluster.start(bound=1000, rate=rate, window=WINDOW) for _ in range(3)]
        stopping = False

        async def ask(permits: Permits, account: str) -> None:
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
        for permits in [*cluster.running]:
            await cluster.kill(permits)
        assert quota.most() <= 40
