"""The permits of several processes in virtual time: without contention, in the queue, leaving and refused.

Faults are in test_permits_faults.py, the provider's quota in test_permits_rate.py.
"""

import asyncio
import random

import pytest

from gateway.errors import InferenceDisabled, ProviderQuotaExhausted
from gateway.inference.concurrency.waiting import Permit
from gateway.redis.client import Store
from gateway.settings import ProviderRate
from tests.gateway.inference.permit_processes import (
    LATENCY_SECONDS,
    Process,
    Provider,
    SimulatedRedis,
    now,
    settle_down,
    take,
)
from tests.support.background import cancel
from tests.support.polling import wait_until
from tests.support.virtual_time import virtual_time

ROUND_TRIP = 2 * LATENCY_SECONDS


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
async def test_a_process_gets_every_free_permit(simulated: SimulatedRedis) -> None:
    one, two = simulated.start(limit=10), simulated.start(limit=10)
    await settle_down()
    began = now()
    held = await take(one, 10)
    assert now() - began < 10 * ROUND_TRIP
    assert (one.used, two.used, two.spare) == (10, 0, 0)
    for permit in held:
        one.release(permit)
    assert len(await take(two, 10)) == 10


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


@virtual_time
async def test_a_burst_beyond_the_free_permits_waits_within_its_limit(simulated: SimulatedRedis) -> None:
    permits = simulated.start(limit=100)
    await take(permits, 1)
    asked = [asyncio.create_task(permits.wait_for_permit("acc", "app", 1)) for _ in range(500)]
    await asyncio.sleep(1)
    done = [task for task in asked if task.done()]
    refused = [task for task in done if isinstance(task.exception(), ProviderQuotaExhausted)]
    assert (len(done), len(refused), permits.waiting) == (440, 341, 60)
    await cancel(*asked)


@virtual_time
async def test_retry_after_accounts_for_requests_that_still_run(simulated: SimulatedRedis) -> None:
    permits = simulated.start(limit=20, max_wait=45)
    await take(permits, 20)
    began = now()
    with pytest.raises(ProviderQuotaExhausted) as refusal:
        await permits.wait_for_permit("other", "app", 1)
    assert now() - began == pytest.approx(45)
    assert refusal.value.retry_after is not None
    assert 45 <= refusal.value.retry_after <= 47, "if no permit was freed for 45 seconds, none may be for another 45"


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
async def test_without_waiting_a_request_still_makes_one_call(simulated: SimulatedRedis) -> None:
    one, two = simulated.start(limit=4, max_wait=0), simulated.start(limit=4, max_wait=0)
    await settle_down()
    held = await take(two, 4)
    with pytest.raises(ProviderQuotaExhausted):
        await take(one, 1)
    two.release(held[0])
    assert await take(one, 1)


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
