"""Each account's API requests are limited in number and time."""

import asyncio
from typing import Any

import pytest

from gateway.accounts import pacing
from gateway.accounts.pacing import METER, Pacing, RequestMeter, leave_lane
from gateway.errors import RateLimited
from tests.support.virtual_time import virtual_time


async def admit(
    paces: Pacing, account: str, state: dict[str, Any], *, caller: str = "key", paced: bool = True, **options: bool
) -> None:
    await paces.meter(account, caller, state, **options).enter(paced=paced)


async def test_two_at_a_time_and_in_order() -> None:
    paces, states = Pacing(), [dict[str, Any]() for _ in range(5)]
    admitted: list[int] = []

    async def request(number: int) -> None:
        await admit(paces, "ana", states[number])
        admitted.append(number)

    requests = [asyncio.create_task(request(number)) for number in range(5)]
    await asyncio.sleep(0.01)
    assert admitted == [0, 1]
    await admit(paces, "ben", {})
    for _ in range(5):  # long requests hold no slot
        await asyncio.wait_for(admit(paces, "ben", {}, paced=False), 1)
    requests[2].cancel()
    leave_lane(states[0])
    leave_lane(states[0])
    await asyncio.sleep(0.01)
    assert admitted == [0, 1, 3], "one slot was freed, and only once"
    leave_lane(states[1])
    await asyncio.wait(requests)
    assert admitted == [0, 1, 3, 4]


@virtual_time
async def test_an_account_that_has_used_its_time_waits() -> None:
    """But not another account, nor when it takes rights away."""
    paces, state, worked = Pacing(), dict[str, Any](), 0.0

    async def work() -> None:
        nonlocal worked
        await admit(paces, "ana", state)
        for _ in range(2):
            worked += (pacing.SAVED_SECONDS + 0.1) / 2
            await asyncio.sleep(0)

    began = asyncio.get_running_loop().time()
    await RequestMeter(work(), state, clock=lambda: worked)
    await asyncio.wait_for(admit(paces, "ben", {}), 1)
    await admit(paces, "ana", state)
    assert 0.1 / pacing.TIME_SHARE <= asyncio.get_running_loop().time() - began < 5
    leave_lane(state)
    state[METER].charge(60)
    with pytest.raises(RateLimited) as refused:
        await admit(paces, "ana", {})
    assert refused.value.retry_after is not None
    assert 250 < refused.value.retry_after < 310
    await asyncio.wait_for(admit(paces, "ben", {}), 1)
    await asyncio.wait_for(admit(paces, "ana", {}, takes_rights=True), 0.1)


@virtual_time
async def test_the_number_of_waiting_requests_is_limited() -> None:
    paces = Pacing()
    for _ in range(2):
        await admit(paces, "ana", {})
    waiting = [asyncio.create_task(admit(paces, "ana", {})) for _ in range(pacing.MAX_WAITING)]
    await asyncio.sleep(0.01)
    with pytest.raises(RateLimited):
        await asyncio.wait_for(admit(paces, "ana", {}), 0.1)  # at once
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    again = asyncio.create_task(admit(paces, "ana", {}))  # canceled requests no longer count
    await asyncio.sleep(0.01)
    assert not again.done()
    again.cancel()
    await asyncio.wait([again])


async def test_a_request_is_metered_step_by_step_and_its_slot_is_freed() -> None:
    paces, state = Pacing(), dict[str, Any]()

    async def fails() -> None:
        await admit(paces, "ana", state)
        await asyncio.sleep(0.2)  # costs nothing
        raise KeyError("x")

    with pytest.raises(KeyError):
        await RequestMeter(fails(), state)
    assert state[METER]._lane._spent < 0.05

    async def hangs() -> None:
        await admit(paces, "ana", state)
        await asyncio.sleep(60)

    async def run() -> None:
        await RequestMeter(hangs(), state)

    task = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    assert state[METER]._lane._running == 1
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert state[METER]._lane._running == 0


@virtual_time
async def test_callers_take_turns() -> None:
    """One that sends more requests than all others delays each of them by one request."""
    paces, admitted = Pacing(), list[str]()

    async def request(caller: str) -> None:
        state: dict[str, Any] = {}
        await admit(paces, "ana", state, caller=caller)
        admitted.append(caller)
        await asyncio.sleep(0.01)
        leave_lane(state)

    flood = [asyncio.create_task(request("flood")) for _ in range(100)]
    await asyncio.sleep(0)
    others = [asyncio.create_task(request(caller)) for caller in ("one", "two", "one")]
    await asyncio.wait(others)
    assert admitted.count("flood") <= 2 + 2 * len(others)
    for task in flood:
        task.cancel()
    await asyncio.wait(flood)
    for _ in range(2_000):  # requests that are refused use up the caller's time alone
        paces.meter("ben", "flood", {})
    await asyncio.wait_for(admit(paces, "ben", {}, caller="other"), 0.1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(admit(paces, "ben", {}, caller="flood"), 0.1)


@pytest.mark.parametrize(
    ("size", "limit", "words"),
    [
        (10, pacing.MAX_BODIES, "complete their bodies"),
        (None, pacing.MAX_LARGE_BODIES, "large requests"),
        (pacing.SMALL_BODY_BYTES + 1, pacing.MAX_LARGE_BODIES, "large requests"),
    ],
)
@virtual_time
async def test_bodies_that_are_on_their_way_are_limited(size: int | None, limit: int, words: str) -> None:
    """Of a caller the small ones, of an account the large ones, which would fill the memory."""
    paces, ended, is_small = Pacing(), asyncio.Event(), words == "complete their bodies"

    async def send(caller: str, size: int | None) -> None:
        async with paces.meter("ana", caller, {}).receiving(size):
            await ended.wait()

    sending = [asyncio.create_task(send("one" if is_small else f"key {n}", size)) for n in range(limit)]
    await asyncio.sleep(0.01)
    with pytest.raises(RateLimited, match=words):
        await asyncio.wait_for(send("one" if is_small else "another", size), 60)
    sending.append(asyncio.create_task(send("another", pacing.SMALL_BODY_BYTES)))
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in sending)
    ended.set()
    await asyncio.wait(sending)
    await send("one", size)
