"""The permits, and the provider's quota of any minute, of several processes in virtual time.

In the random histories, no more requests run at each provider than its limit, whatever is asked, granted, moved,
canceled or killed. A request ends once. At the end all permits are there again, and none was needed that was free.
"""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from gateway.errors import BackboneUnavailable, InferenceDisabled, ProviderQuotaExhausted
from gateway.inference.concurrency.lease import BudgetAnswer
from gateway.inference.concurrency.quota import Budget, time_until_free
from gateway.inference.concurrency.waiting import Permit, Waiter
from gateway.redis.client import Store
from gateway.settings import ProviderRate
from tests.gateway.inference.permit_processes import (
    LATENCY_SECONDS,
    Process,
    Provider,
    Quota,
    SimulatedRedis,
    now,
    settle_down,
    take,
)
from tests.lua.leases import MESSAGES
from tests.lua.scripts import CLOCK
from tests.support.background import cancel
from tests.support.polling import wait_until
from tests.support.virtual_time import virtual_time

ROUND_TRIP = 2 * LATENCY_SECONDS


@pytest.fixture
def simulated(redis_url: str) -> Iterator[SimulatedRedis]:
    """For tests in virtual time."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield SimulatedRedis(client)
        client.delete(CLOCK, MESSAGES)


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(1)


# -- without contention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "calls"), [(None, 5), (ProviderRate(100_000, 100_000_000), 60)])
@virtual_time
async def test_an_uncontended_request_makes_no_call(
    simulated: SimulatedRedis, rate: ProviderRate | None, calls: int
) -> None:
    permits = simulated.start(limit=100, rate=rate)
    await settle_down()
    simulated.calls.clear()
    for n in range(1000):
        held = [permits.take_now("acc", 2_000), permits.take_now("acc", 2_000)]
        await asyncio.sleep(0.01)
        for permit in held:
            assert permit, n
            permits.release(permit, tokens=300)
    assert len(simulated.calls) <= calls, "only the renewals every two seconds, and top-ups of a budget"


@virtual_time
async def test_idle_permits_are_returned(simulated: SimulatedRedis) -> None:
    permits = simulated.start(limit=100)
    for permit in await take(permits, 60):
        permits.release(permit)
    assert permits.spare >= 60
    await asyncio.sleep(10)
    assert permits.spare == 4


async def test_without_a_limit_redis_is_not_needed() -> None:
    permits = Process(Store("redis://127.0.0.1:1/0"), limit=0, max_wait=0)
    run = asyncio.create_task(permits.run())
    held = [permits.take_now("acc") for _ in range(500)]
    await asyncio.sleep(0)
    assert permits.used == 500
    for permit in held:
        assert permit
        permits.release(permit)
    assert permits.used == 0
    run.cancel()
    await permits.close()


# -- contention ------------------------------------------------------------------------------------------------


@virtual_time
async def test_a_freed_permit_is_used_at_once_in_another_process(simulated: SimulatedRedis) -> None:
    one, two = simulated.start(limit=5), simulated.start(limit=5)
    held = await take(one, 5)
    for permit in held:
        waiting = asyncio.create_task(two.wait_for_permit("other", "app", 1))
        await asyncio.sleep(0.05)
        began = now()
        one.release(permit)
        await waiting
        assert now() - began <= ROUND_TRIP, "the call of one process, and the message to the other"


# -- leaving ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["canceled", "left", "failed"])
@virtual_time
async def test_a_request_that_leaves_loses_nothing(simulated: SimulatedRedis, way: str) -> None:
    """Neither a permit nor a request of the quota is lost."""
    rate = ProviderRate(requests=3)
    one, two = simulated.start(limit=3, rate=rate), simulated.start(limit=3, rate=rate)
    for _ in range(12):
        held = await take(one, 3)
        waiters = [two.ask("acc", "app", 1) for _ in range(4)]
        waiting = [asyncio.create_task(waiter.wait(10)) for waiter in waiters]
        await asyncio.sleep(random.uniform(0, 3 * ROUND_TRIP))
        for permit in held:
            one.release(permit, served=False)
        await asyncio.sleep(random.uniform(0, 3 * ROUND_TRIP))
        if way == "failed":
            two.fail_waiting(InferenceDisabled())
        for task, waiter in zip(waiting, waiters, strict=True):
            if way == "canceled":
                task.cancel()
            elif way == "left":
                waiter.leave(ConnectionError())
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(result, Permit):
                two.release(result, served=False)
        assert (one.used, two.used, two.waiting) == (0, 0, 0)
    assert len(await take(two, 3)) == 3


@pytest.mark.parametrize("rate", [None, ProviderRate(requests=1)])
@pytest.mark.parametrize("granted_first", [True, False])
@virtual_time
async def test_a_request_canceled_at_the_moment_of_its_grant_loses_nothing(
    simulated: SimulatedRedis, granted_first: bool, rate: ProviderRate | None
) -> None:
    permits = simulated.start(limit=1, rate=rate)
    (held,) = await take(permits, 1)
    waiting = asyncio.create_task(permits.wait_for_permit("acc", "app", 1))
    await asyncio.sleep(0.1)
    simulated.freeze()
    await asyncio.sleep(1)  # from now on, a freed permit is granted at once
    if granted_first:
        permits.release(held, served=False)
        assert permits.used == 1
        waiting.cancel()
    else:
        waiting.cancel()
        permits.release(held, served=False)
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert (permits.used, permits.spare, permits.waiting) == (0, 1, 0)
    assert await asyncio.wait_for(permits.wait_for_permit("acc", "app", 1), 1)


# -- refusals --------------------------------------------------------------------------------------------------


@virtual_time
async def test_the_61st_waiting_request_is_refused_with_a_true_retry_after(simulated: SimulatedRedis) -> None:
    permits = simulated.start(limit=4, max_wait=60)
    provider, duration = Provider(), 0.5
    for _ in range(50):
        await asyncio.gather(*(provider.request(permits, "acc", duration) for _ in range(4)))
    crowd = [asyncio.create_task(provider.request(permits, "acc", duration)) for _ in range(64)]
    others = [asyncio.create_task(provider.request(permits, "other", duration)) for _ in range(60)]
    await wait_until(lambda: permits.waiting == 120)
    began = now()
    with pytest.raises(ProviderQuotaExhausted) as refusal:
        await permits.wait_for_permit("acc", "app", 1)
    await asyncio.gather(*crowd, *others)
    assert refusal.value.retry_after
    assert refusal.value.retry_after == pytest.approx(now() - began, abs=1.5)


@virtual_time
async def test_at_most_sixty_requests_of_an_account_wait_in_all_processes(simulated: SimulatedRedis) -> None:
    processes = [simulated.start(limit=2, max_wait=60) for _ in range(3)]
    held = await take(processes[0], 2)
    waiting = [asyncio.create_task(p.wait_for_permit("acc", "app", 1)) for p in processes for _ in range(30)]
    others = [asyncio.create_task(p.wait_for_permit("other", "app", 1)) for p in processes]
    await asyncio.sleep(2)
    refused = [task.exception() for task in waiting if task.done()]
    assert len(refused) == 30
    assert all(isinstance(error, ProviderQuotaExhausted) for error in refused)
    assert not any(task.done() for task in others)
    await cancel(*waiting, *others)
    for permit in held:
        processes[0].release(permit)


@virtual_time
async def test_a_429_halves_the_limit_and_it_grows_back(simulated: SimulatedRedis) -> None:
    one, two = simulated.start(limit=4), simulated.start(limit=4)
    held = await take(one, 4)
    waiting = asyncio.create_task(two.wait_for_permit("acc", "app", 1))
    one.halve_limit()
    await wait_until(lambda: one.in_force == 2, every=ROUND_TRIP)
    cut = now()
    one.halve_limit()
    one.release(held[0])
    one.release(held[1])
    await asyncio.sleep(0.1)
    assert one.in_force == 2, "it is halved at most once per second"
    assert not waiting.done()
    await waiting
    assert now() - cut == pytest.approx(1, abs=0.1), "the limit is 3 again, and the waiting process called by itself"


@virtual_time
async def test_the_permits_of_a_killed_process_are_free_after_its_lease(simulated: SimulatedRedis) -> None:
    one, two = simulated.start(limit=6, max_wait=60), simulated.start(limit=6, max_wait=60)
    await take(one, 6)
    await settle_down()
    waiting = [asyncio.create_task(two.wait_for_permit("acc", "app", 1)) for _ in range(6)]
    await asyncio.sleep(0.1)
    called = max(at for at, name in simulated.calls if name == one.name)
    await simulated.kill(one)
    await asyncio.gather(*waiting)
    assert now() - called == pytest.approx(28, abs=0.1)


@virtual_time
async def test_a_stopped_process_returns_all_its_permits(simulated: SimulatedRedis) -> None:
    one, two = simulated.start(limit=8), simulated.start(limit=8)
    await settle_down()
    for permit in await take(one, 8):
        one.release(permit)
    await simulated.stop(one)
    began = now()
    assert len(await take(two, 8)) == 8
    assert now() - began < 0.1


@virtual_time
async def test_redis_away_for_a_while(simulated: SimulatedRedis) -> None:
    """Freed permits go to the process's own waiting requests. The limit holds before, during and after the outage."""
    provider, limit = Provider(), 12
    processes = [simulated.start(limit=limit) for _ in range(3)]
    end = now() + 7

    async def ask(permits: Process, account: str) -> None:
        while now() < end:
            await provider.request(permits, account, random.uniform(0.03, 0.1))

    async def measure_use(seconds: float) -> float:
        busy = provider.busy
        await asyncio.sleep(seconds)
        return (provider.busy - busy) / (seconds * limit)

    tasks = [asyncio.create_task(ask(p, f"acc{n}")) for p in processes for n in range(8)]
    await asyncio.sleep(1)
    simulated.freeze()
    await asyncio.sleep(0.5)
    used_meanwhile = await measure_use(3)
    simulated.thaw()
    await asyncio.sleep(1)
    used_afterwards = await measure_use(1)
    await asyncio.gather(*tasks)
    assert provider.most == limit
    assert used_meanwhile > 0.6
    assert used_afterwards > 0.85


@virtual_time
async def test_waiting_requests_are_reported_again_after_a_lost_call(simulated: SimulatedRedis) -> None:
    one, two = simulated.start(limit=1), simulated.start(limit=1)
    [held] = await take(two, 1)
    await settle_down()
    network = simulated.running[one][1]

    async def lose(keys: list[str], args: list[Any]) -> Any:
        network.call = simulated.call
        raise BackboneUnavailable from TimeoutError()

    network.call = lose
    waiting = asyncio.create_task(one.wait_for_permit("acc", "app", 1))
    await asyncio.sleep(2)
    assert [*(await simulated.share(two)).waiting] == ["acc"]
    two.release(held)
    await waiting


@virtual_time
async def test_redis_away_for_longer_than_the_lease(simulated: SimulatedRedis) -> None:
    one, two = (simulated.start(limit=4, max_wait=120) for _ in range(2))
    held = await take(one, 4)
    waiting = [asyncio.create_task(p.wait_for_permit("acc", "app", 1)) for p in (one, two) for _ in range(2)]
    await asyncio.sleep(0.3)
    simulated.freeze()
    await asyncio.sleep(30)
    one.release(held[0])
    await asyncio.sleep(5)
    assert (one.used, two.used) == (3, 0), "without a lease no request may take the freed permit"
    simulated.thaw()
    await asyncio.sleep(10)
    assert one.used + two.used == 4
    for permit in held[1:]:
        one.release(permit)
    await asyncio.gather(*waiting)
    assert one.used + two.used == 4


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
async def test_a_quota_without_a_limit_of_permits(simulated: SimulatedRedis) -> None:
    permits, quota = simulated.start(limit=0, rate=ProviderRate(requests=200)), Quota()
    asks = [asyncio.create_task(quota.request(permits, f"acc{n % 50}", 5.0)) for n in range(300)]
    await asyncio.sleep(3)
    assert (len(quota.starts), permits.used, permits.in_force) == (200, 200, 0)
    await cancel(*asks)


def test_a_repeated_answer_grants_nothing_more() -> None:
    budget = Budget(ProviderRate(100, 100_000))
    budget.begin(1)
    for requests, tokens in ((4, 10_000), (3, 9_000), (4, 10_000)):
        budget.accept(BudgetAnswer(requests, tokens, 0, 0, 0, []))
    assert (budget.requests.spare, budget.tokens.spare) == (4, 10_000)


def test_requests_always_fit_without_a_quota_of_requests() -> None:
    budget = Budget(ProviderRate(requests=0, tokens=500))
    budget.begin(1)
    budget.accept(BudgetAnswer(0, 500, -1, 0, 0, []))
    assert budget.is_possible(500)
    assert not budget.is_possible(501)
    for _ in range(5):
        assert budget.fits(100)
        budget.take(100, 99.0)
        budget.spend_request(1)
    assert not budget.fits(1)
    call = budget.call(100.0, scarce=False, regular=False, wanted=True, returnable=True)
    assert call.requests.want == 0


@pytest.mark.parametrize(
    ("needed", "seconds"), [(1, 0), (2, 0), (3, 5), (7, 5), (8, 30), (9, 60), (10, 60), (11, 60), (13, 65), (25, 125)]
)
def test_the_time_until_an_amount_is_free(needed: float, seconds: float) -> None:
    """Of ten, two are free, five and one become free after 5 and 30 s, and two are held."""
    assert time_until_free(needed, 10, 2, [(5, 5), (30, 1)], 60) == seconds


def test_without_a_quota_every_amount_is_free() -> None:
    assert time_until_free(1_000, 0, -1, [], 60) == 0


LIMITS = {"a": 3, "b": 2}
STEPS = 200


class History:
    """Two processes with the permits of two providers, and what they run."""

    def __init__(self, simulated: SimulatedRedis, seed: int) -> None:
        self.rng = random.Random(seed)
        self.redis = simulated
        self.processes = [self.start(), self.start()]
        self.running: Counter[str] = Counter()
        self.waiters: dict[Waiter, list[Process]] = {}
        self.tasks: list[asyncio.Task[None]] = []  # in order, so that a seed has one history
        self.outcomes: Counter[str] = Counter()

    def start(self) -> list[Process]:
        return [self.redis.start(provider=name, limit=limit) for name, limit in LIMITS.items()]

    async def request(self, pools: list[Process], account: str, seconds: float) -> None:
        usable = self.rng.choice([pools, pools, pools[:1], pools[1:]])
        permit = next((taken for pool in usable if (taken := pool.take_now(account)) is not None), None)
        if permit is None:
            waiter = Waiter(account, "app", 1, since=now())
            self.waiters[waiter] = pools
            try:
                waiter.move(usable)
                permit = await waiter.wait(4)
            except (ProviderQuotaExhausted, InferenceDisabled) as refusal:
                self.outcomes[refusal.code] += 1
                return
            finally:
                del self.waiters[waiter]
        provider = next(pool for pool in pools if pool is permit.permits).provider
        self.running[provider] += 1
        assert self.running[provider] <= LIMITS[provider]
        try:
            await asyncio.sleep(seconds)
        finally:
            self.running[provider] -= 1
            permit.permits.release(permit)
        self.outcomes["served"] += 1

    def ask(self) -> None:
        pools, account = self.rng.choice(self.processes), f"acc{self.rng.randrange(4)}"
        task = asyncio.create_task(self.request(pools, account, self.rng.random()))
        self.tasks.append(task)

    def step(self) -> None:
        match self.rng.choice(["ask"] * 6 + ["move"] * 3 + ["cancel", "leave", "halve"]):
            case "ask":
                self.ask()
            case "move" if self.waiters:
                waiter, pools = self.rng.choice([*self.waiters.items()])
                waiter.move(self.rng.choice([pools, pools[:1], pools[1:]]))
            case "leave" if self.waiters:
                self.rng.choice([*self.waiters]).leave(InferenceDisabled())
            case "cancel" if self.tasks:
                self.rng.choice([task for task in self.tasks if not task.done()] or self.tasks).cancel()
            case "halve":
                self.rng.choice(self.rng.choice(self.processes)).halve_limit()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))])
@virtual_time
async def test_random_histories_keep_the_limits_and_lose_no_permit(simulated: SimulatedRedis, seed: int) -> None:
    history = History(simulated, seed)
    await settle_down()
    for _ in range(STEPS):
        history.step()
        await asyncio.sleep(history.rng.choice([0, 0, 0.001, 0.005, 0.1]))
        simulated.loses_messages = history.rng.random() < 0.1
    simulated.loses_messages = False
    results: list[Any] = await asyncio.gather(*history.tasks, return_exceptions=True)
    assert not [each for each in results if isinstance(each, AssertionError)]
    assert all(each is None or isinstance(each, asyncio.CancelledError) for each in results)
    assert history.outcomes["served"] > STEPS / 4
    await asyncio.sleep(120)  # the limits have grown back
    for number, (name, limit) in enumerate(LIMITS.items()):
        pools = [process[number] for process in history.processes]
        assert [(pool.used, pool.waiting) for pool in pools] == [(0, 0), (0, 0)], name
        for pool in pools:
            held = [pool.take_now("acc") or await pool.wait_for_permit("acc", "app", 1) for _ in range(limit)]
            for permit in held:
                pool.release(permit)
            await settle_down()
