"""Requests that wait for several providers at once, in random histories and in virtual time.

The model: at each provider, no more requests run than its limit, whatever is asked, granted, moved, canceled or killed.
A request ends once. At the end all permits are there again, and none was needed that was free.
"""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from gateway.errors import InferenceDisabled, ProviderQuotaExhausted
from gateway.inference.concurrency.waiting import Waiter
from tests.gateway.inference.permit_processes import Process, SimulatedRedis, now, settle_down
from tests.support.virtual_time import virtual_time

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
