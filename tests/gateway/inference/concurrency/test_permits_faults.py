"""Permits when processes die, messages are lost, or Redis is away."""

import asyncio
import random
from typing import Any

import pytest

from gateway.errors import BackboneUnavailable
from tests.gateway.inference.permit_processes import (
    LATENCY_SECONDS,
    Process,
    Provider,
    SimulatedRedis,
    now,
    settle_down,
    take,
)
from tests.support.virtual_time import virtual_time


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
async def test_the_waiting_requests_of_a_killed_process_delay_no_other(simulated: SimulatedRedis) -> None:
    one, two, three = (simulated.start(limit=4) for _ in range(3))
    held = await take(one, 4)
    crowd = [asyncio.create_task(two.wait_for_permit("crowd", "app", 1)) for _ in range(60)]
    await asyncio.sleep(0.1)
    await simulated.kill(two)
    for task in crowd:
        task.cancel()
    await asyncio.sleep(1.1)
    for permit in held:
        one.release(permit)
    began = now()
    assert len(await take(three, 4)) == 4
    assert now() - began < 0.1


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
async def test_grants_arrive_with_the_next_answers_if_all_messages_are_lost(simulated: SimulatedRedis) -> None:
    one, two = simulated.start(limit=4), simulated.start(limit=4)
    await settle_down()
    simulated.loses_messages = True
    provider = Provider()
    waits = await asyncio.gather(*(provider.request((one, two)[n % 2], "acc", 0.01) for n in range(40)))
    assert provider.most <= 4
    assert max(waits) < 4


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
async def test_a_lost_answer_said_that_redis_forgot_the_waiting_requests(simulated: SimulatedRedis) -> None:
    """Redis forgets the waiting requests of a silent process, and reports that only in the next answer."""
    silent, other = simulated.start(limit=1), simulated.start(limit=1)
    [held] = await take(other, 1)
    waiters = [silent.ask(f"acc{n}", "app", 1) for n in range(3)]
    network = simulated.running[silent][1]

    async def is_known() -> list[str]:
        return sorted((await simulated.share(other)).waiting)

    async def lose_call(keys: list[str], args: list[Any]) -> Any:
        await asyncio.sleep(LATENCY_SECONDS)
        raise BackboneUnavailable from TimeoutError()

    async def lose_answer(keys: list[str], args: list[Any]) -> Any:
        network.call = simulated.call
        await simulated.call(keys, args)
        raise BackboneUnavailable from TimeoutError()

    await asyncio.sleep(1)
    assert await is_known() == ["acc0", "acc1", "acc2"]
    network.call = lose_call
    await asyncio.sleep(4)
    assert await is_known() == []
    network.call = lose_answer
    await asyncio.sleep(2)
    assert await is_known() == ["acc0", "acc1", "acc2"]
    for waiter in waiters:
        waiter.leave(BackboneUnavailable())
    other.release(held)


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
