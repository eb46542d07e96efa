"""Budgets of work, and slots, with clocks that the test sets."""

import asyncio

import pytest

from gateway.accounts.records import App
from gateway.errors import TokensLimited
from gateway.inference.auth.verification_budget import (
    ACCOUNT_RATE,
    APP_RATE,
    BURST_SECONDS,
    VALID_WEIGHT,
    VerificationLimits,
)


class Clock:
    """The time, and the time of work, in seconds."""

    now, work = 100.0, 5.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limits(clock: Clock) -> VerificationLimits:
    return VerificationLimits(30, clock=lambda: clock.now, thread_clock=lambda: clock.work)


def an_app(name: str = "shop", account: str = "acc_1") -> App:
    return App(id=name, name=name, account=account, createdAt="2026-11-21T00:00:00.000Z")


async def verify(limits: VerificationLimits, app: App, clock: Clock, seconds: float, *, valid: bool = False) -> None:
    verification = await limits.begin(app)
    clock.work += seconds
    verification.finish(valid=valid)
    await asyncio.sleep(0)


async def test_an_app_that_used_up_its_time_is_refused_and_no_other(limits: VerificationLimits, clock: Clock) -> None:
    app, other = an_app(), an_app("blog", "acc_2")
    await verify(limits, app, clock, APP_RATE * BURST_SECONDS + 0.19)
    for _ in range(3):
        with pytest.raises(TokensLimited) as refused:
            await limits.begin(app)
        assert refused.value.retry_after == 2
        limit, remaining, reset = (value for _, value in refused.value.headers)
        assert (limit, remaining, reset) == (b"30", b"0", b"2")
        await verify(limits, other, clock, 0.001)
    clock.now += 2.1
    await verify(limits, app, clock, 0.001)


async def test_the_apps_of_an_account_share_a_budget(limits: VerificationLimits, clock: Clock) -> None:
    """Otherwise, fifty apps of one account could use fifty times as much."""
    for number in range(2):
        await verify(limits, an_app(f"app-{number}"), clock, APP_RATE * BURST_SECONDS - 0.0001)
    with pytest.raises(TokensLimited):
        await limits.begin(an_app("app-3"))
    await verify(limits, an_app("app-3", "acc_2"), clock, ACCOUNT_RATE)


async def test_valid_tokens_cost_a_part(limits: VerificationLimits, clock: Clock) -> None:
    app = an_app()
    for _ in range(3):
        await verify(limits, app, clock, APP_RATE * BURST_SECONDS * 0.99 / 3 / VALID_WEIGHT * 0.5, valid=True)
    await verify(limits, app, clock, 1)
    with pytest.raises(TokensLimited):
        await limits.begin(app)


async def test_an_account_has_one_slot_in_each_round_of_the_loop(limits: VerificationLimits) -> None:
    """Many tokens that arrive together do not delay other accounts."""
    rounds = 0
    seen: dict[str, list[int]] = {"acc_1": [], "acc_2": []}

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async def ask(account: str) -> None:
        verification = await limits.begin(an_app(account=account))
        seen[account].append(rounds)
        verification.finish(valid=False)

    counting = asyncio.create_task(count_rounds())
    await asyncio.gather(*(ask("acc_1") for _ in range(50)), *(ask("acc_2") for _ in range(2)))
    counting.cancel()
    assert len(set(seen["acc_1"])) == 50
    assert max(seen["acc_2"]) - min(seen["acc_2"]) < 5
    await asyncio.sleep(0.01)
    assert limits._waiting == {}


async def test_canceled_requests_do_not_block_the_slots(limits: VerificationLimits, clock: Clock) -> None:
    tasks = [asyncio.create_task(verify(limits, an_app(), clock, 0)) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(result is None for result in results) >= 10
    await asyncio.sleep(0.01)
    assert limits._waiting == {}


async def test_waiting_tokens_and_budgets_are_limited(clock: Clock) -> None:
    limits = VerificationLimits(30, clock=lambda: clock.now, max_waiting=5, max_budgets=10)
    results = await asyncio.gather(*(verify(limits, an_app(), clock, 0) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(result, TokensLimited) for result in results) == 14
    for number in range(20):
        await verify(limits, an_app(f"app-{number}", f"acc-{number}"), clock, 0.001)
    assert len(limits._budgets) == 10
