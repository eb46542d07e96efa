"""The bounds of one app among many."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from workers.hosting import limits
from workers.hosting.limits import APP_REQUESTS, APP_WAITING, GUARANTEED, Busy, Patience, RequestLimits


async def fill(stack: AsyncExitStack, bounds: RequestLimits, app_id: str, count: int) -> None:
    for _ in range(count):
        await stack.enter_async_context(bounds.take(app_id))


async def test_an_app_has_so_many_requests_and_others_have_theirs() -> None:
    bounds, order = RequestLimits(10_000), []

    async def request(number: int) -> None:
        async with bounds.take("a"):
            order.append(number)

    async with AsyncExitStack() as stack:
        await fill(stack, bounds, "a", APP_REQUESTS)
        waiting = [asyncio.create_task(request(number)) for number in range(APP_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await request(-1)
        await fill(stack, bounds, "b", APP_REQUESTS)
        assert order == []
    await asyncio.gather(*waiting)
    assert order == list(range(APP_WAITING)), "in order"
    assert vars(bounds) == vars(RequestLimits(10_000)), "nothing is left of requests that ended"


async def test_a_request_waits_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAIT_SECONDS", 0.05)
    bounds = RequestLimits(10_000)
    async with AsyncExitStack() as stack:
        await fill(stack, bounds, "a", APP_REQUESTS)
        with pytest.raises(Busy):
            async with bounds.take("a"):
                pass
    assert vars(bounds) == vars(RequestLimits(10_000))


@pytest.mark.parametrize("admitted", [False, True], ids=["while-it-waits", "as-it-is-admitted"])
async def test_a_visitor_who_leaves_keeps_nothing(admitted: bool) -> None:
    bounds = RequestLimits(10_000)

    async def request() -> None:
        async with bounds.take("a"):
            await asyncio.Event().wait()

    async with AsyncExitStack() as stack:
        await fill(stack, bounds, "a", APP_REQUESTS)
        waiting = asyncio.create_task(request())
        await asyncio.sleep(0)
        if admitted:
            await stack.aclose()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert vars(bounds) == vars(RequestLimits(10_000))


async def test_apps_that_fill_the_server_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAIT_SECONDS", 0.05)
    bounds = RequestLimits(100)
    async with AsyncExitStack() as stack:
        await fill(stack, bounds, "a", 60)
        await fill(stack, bounds, "b", 40)
        with pytest.raises(Busy):
            await fill(stack, bounds, "a", 1)
        await fill(stack, bounds, "c", GUARANTEED)
        with pytest.raises(Busy):
            await fill(stack, bounds, "c", 1)


async def test_a_visitor_may_be_slow_but_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLOW_SECONDS", 0.2)
    patience = Patience()
    for _ in range(6):
        async with patience.waiting():
            await asyncio.sleep(0.05)
        patience.earn(1_024)
    assert not patience.exhausted


async def test_a_drip_uses_the_time_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLOW_SECONDS", 0.2)
    patience = Patience()

    async def drip() -> None:
        while True:
            async with patience.waiting():
                await asyncio.sleep(0.01)
            patience.earn(1)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(drip(), 10)
    assert patience.exhausted
