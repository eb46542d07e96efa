"""A limiter shared by tenants: a tenant without slots gets one at once, whatever the others hold."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable

from gateway.outbound.tenant_limiter import TenantLimiter
from tests.support.background import cancel


async def acquire_all(
    limiter: TenantLimiter, tenant: str, count: int
) -> tuple[list[Callable[[], None]], list[asyncio.Task[None]]]:
    """Asks for `count` slots. Returns the release functions of those granted, and the tasks that wait for the rest."""
    got: list[Callable[[], None]] = []

    async def acquire() -> None:
        got.append(await limiter.acquire(tenant))

    tasks = [asyncio.create_task(acquire()) for _ in range(count)]
    await asyncio.sleep(0.01)
    return got, [task for task in tasks if not task.done()]


async def test_a_tenant_without_turns_never_waits() -> None:
    """However many tenants hold all the slots that they may."""
    limiter, waiting = TenantLimiter(512), []
    for number in range(100):
        waiting += (await acquire_all(limiter, f"greedy-{number}", 20))[1]
        async with asyncio.timeout(0.1):
            (await limiter.acquire("modest"))()
    await cancel(*waiting)


async def test_turns_that_end_go_to_those_who_wait_in_rotation() -> None:
    limiter = TenantLimiter(2)
    first, second = await limiter.acquire("a"), await limiter.acquire("b")
    order: list[str] = []

    async def acquire(tenant: str) -> None:
        release = await limiter.acquire(tenant)
        order.append(tenant)
        await asyncio.sleep(0)
        release()

    tasks = [asyncio.create_task(acquire(tenant)) for tenant in ("c", "c", "c", "d", "d", "e")]
    await asyncio.sleep(0.01)
    first()
    first()  # a second call does nothing
    await asyncio.gather(*tasks)
    assert order == ["c", "d", "e", "c", "d", "c"]
    second()
    assert (limiter._free, limiter._held, limiter._waiting) == (2, {}, {})


async def test_a_slot_that_comes_with_the_cancellation_is_free_again() -> None:
    limiter = TenantLimiter(1)
    release = await limiter.acquire("a")
    waiting = asyncio.create_task(limiter.acquire("b"))
    await asyncio.sleep(0)
    release()
    await cancel(waiting)
    async with asyncio.timeout(1):
        await limiter.acquire("c")


async def test_cancellation_neither_loses_nor_duplicates_slots() -> None:
    """Tasks are canceled at random: while they wait, at the moment they are served, and while they hold a slot."""
    limiter, holding, dice = TenantLimiter(8), Counter[str](), random.Random(5)
    tasks: list[asyncio.Task[None]] = []

    async def call(tenant: str) -> None:
        release = await limiter.acquire(tenant)
        holding[tenant] += 1
        assert holding.total() <= 8
        try:
            await asyncio.sleep(dice.random() / 500)
        finally:
            holding[tenant] -= 1
            release()

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
    assert (limiter._free, limiter._held, limiter._waiting) == (8, {}, {})
