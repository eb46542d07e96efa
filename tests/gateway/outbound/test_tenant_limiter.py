"""Turns that tenants share: whoever holds none gets one at once, whatever the others hold."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable

import pytest

from gateway.outbound.tenant_limiter import Turns


async def take_all(turns: Turns, tenant: str, count: int) -> tuple[list[Callable[[], None]], list[asyncio.Task[None]]]:
    """What the tenant gets of `count` turns it asks for, and the tasks that wait for the rest."""
    got: list[Callable[[], None]] = []

    async def take() -> None:
        got.append(await turns.take(tenant))

    tasks = [asyncio.create_task(take()) for _ in range(count)]
    await asyncio.sleep(0.01)
    return got, [task for task in tasks if not task.done()]


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_tenant_leaves_most_turns_to_others() -> None:
    turns = Turns(512)
    got, waiting = await take_all(turns, "greedy", 300)
    assert len(got) == 29
    await end(waiting)


@pytest.mark.parametrize("tenants", [1, 10, 100, 200])
async def test_a_tenant_without_turns_never_waits(tenants: int) -> None:
    """Sixteen origins of one account held every turn: 32 calls each, of 256."""
    turns, waiting = Turns(512), []
    for number in range(tenants):
        waiting += (await take_all(turns, f"greedy-{number}", 20))[1]
    async with asyncio.timeout(0.1):
        (await turns.take("modest"))()
    await end(waiting)


async def test_turns_that_end_go_to_those_who_wait_in_rotation() -> None:
    turns = Turns(2)
    first, second = await turns.take("a"), await turns.take("b")
    order: list[str] = []

    async def take(tenant: str) -> None:
        turn = await turns.take(tenant)
        order.append(tenant)
        await asyncio.sleep(0)
        turn()

    tasks = [asyncio.create_task(take(tenant)) for tenant in ("c", "c", "c", "d", "d", "e")]
    await asyncio.sleep(0.01)
    first()
    first()  # a second call does nothing
    await asyncio.gather(*tasks)
    assert order == ["c", "d", "e", "c", "d", "c"]
    second()
    assert (turns._free, turns._held, turns._waiting) == (2, {}, {})


async def test_nothing_is_lost_or_given_twice_whoever_gives_up() -> None:
    """Tasks are canceled at random: while they wait, in the moment they are served, and while they hold a turn."""
    turns, holding, dice = Turns(8), Counter[str](), random.Random(5)
    tasks: list[asyncio.Task[None]] = []

    async def call(tenant: str) -> None:
        turn = await turns.take(tenant)
        holding[tenant] += 1
        assert holding.total() <= 8
        try:
            await asyncio.sleep(dice.random() / 500)
        finally:
            holding[tenant] -= 1
            turn()

    for _ in range(2_000):
        tasks.append(asyncio.create_task(call(dice.choice("abcdef"))))
        if dice.random() < 0.3:
            dice.choice(tasks).cancel()
        if dice.random() < 0.2:
            await asyncio.sleep(dice.random() / 1000)
    async with asyncio.timeout(20):
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
    assert (turns._free, turns._held, turns._waiting) == (8, {}, {})
