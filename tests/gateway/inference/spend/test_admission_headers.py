"""The RateLimit headers, and Retry-After."""

import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.errors import AppRateLimited, ServiceError, SpendCapReached, UserRateLimited
from gateway.inference.spend import scripts
from tests.gateway.inference.admissions import CAP, AdmissionProcess, Books, admission_process
from tests.lua.scripts import CLOCK, SECOND, at, on_test_clock


def rate_limit(headers: list[tuple[bytes, bytes]]) -> tuple[int, int, int]:
    found = dict(headers)
    return tuple(int(found[b"ratelimit-" + name]) for name in (b"limit", b"remaining", b"reset"))


class Clock:
    """The clock that this process's scripts see as Redis's."""

    def __init__(self, books: Books, now: int) -> None:
        self.books, self.now = books, now

    async def to(self, now: int) -> None:
        self.now = now
        await self.books.client.delete(CLOCK)
        await self.books.client.rpush(CLOCK, now // SECOND, now % SECOND)

    async def forward(self, micros: int) -> None:
        await self.to(self.now + micros)


@pytest.fixture
async def clock(books: Books) -> AsyncIterator[Clock]:
    clock = Clock(books, at("2026-11-21T12:00:00"))
    await clock.to(clock.now)
    yield clock
    await books.client.delete(CLOCK)


@asynccontextmanager
async def slow_motion(url: str, limits: tuple[int, int]) -> AsyncIterator[AdmissionProcess]:
    """An admission process on the test's clock."""
    async with admission_process(url, limits) as running:
        admit = scripts._ADMIT
        production = admit.source, admit.sha
        admit.source = on_test_clock("inference/admit")
        admit.sha = hashlib.sha1(admit.source.encode(), usedforsecurity=False).hexdigest()
        try:
            yield running
        finally:
            admit.source, admit.sha = production


async def test_the_headers_describe_the_tighter_limit(redis_url: str, clock: Clock) -> None:
    async with slow_motion(redis_url, (4, 2)) as running:
        assert rate_limit((await running.admit(0, "ana")).headers) == (2, 1, 60)
        await clock.forward(10 * SECOND)
        assert rate_limit((await running.admit(0, "ben")).headers) == (2, 1, 60)
        await clock.forward(SECOND // 2)
        # Three of the app's four are used, and one of this user's two.
        assert rate_limit((await running.admit(0, "eve")).headers)[1:] in {(1, 50), (1, 60)}
        assert rate_limit((await running.admit(0, "ana")).headers)[1:] == (0, 50)
        with pytest.raises(AppRateLimited) as refused:
            await running.admit(0, "eve")
        assert rate_limit(refused.value.headers) == (4, 0, 50)
        assert refused.value.retry_after == 50


async def test_the_headers_of_a_limited_user(redis_url: str, clock: Clock) -> None:
    async with slow_motion(redis_url, (30, 2)) as running:
        await running.admit(0)
        await clock.forward(SECOND)
        await running.admit(0)
        await clock.forward(1)
        with pytest.raises(UserRateLimited) as refused:
            await running.admit(0)
        # 58.999999 seconds, rounded up, so that a caller who waits that long passes.
        assert rate_limit(refused.value.headers) == (2, 0, 59)
        assert refused.value.retry_after == 59


async def refusal(running: AdmissionProcess, max_cost: int = 0, user: str = "ana") -> ServiceError | None:
    try:
        admitted = await running.admit(max_cost, user)
    except ServiceError as error:
        return error
    if admitted.reservation:
        await running.settle(admitted.reservation, 0)
    return None


@pytest.mark.parametrize("limits", [(3, 3), (3, 2), (5, 2), (2, 3), (1, 1)])
async def test_a_request_passes_after_its_retry_after(redis_url: str, clock: Clock, limits: tuple[int, int]) -> None:
    chance = random.Random(repr(limits))
    async with slow_motion(redis_url, limits) as running:
        refused = 0
        while refused < 30:
            await clock.forward(chance.randrange(0, 20 * SECOND))
            user = chance.choice(["ana", "ben", "eve"])
            error = await refusal(running, user=user)
            if error is None:
                continue
            refused += 1
            assert error.retry_after is not None
            assert 1 <= error.retry_after <= 60
            await clock.forward(error.retry_after * SECOND)
            assert await refusal(running, user=user) is None


async def test_a_full_app_and_a_full_user(redis_url: str, clock: Clock) -> None:
    """Both limits refuse, so the caller can pass only when both have a free slot."""
    async with slow_motion(redis_url, (3, 2)) as running:
        await running.admit(0, "ben")
        await clock.forward(30 * SECOND)
        await running.admit(0, "ana")
        await running.admit(0, "ana")
        error = await refusal(running, user="ana")
        assert isinstance(error, AppRateLimited)
        assert error.retry_after == 60


async def test_a_full_day_ends_at_midnight(redis_url: str, clock: Clock, books: Books) -> None:
    async with slow_motion(redis_url, (30, 20)) as running:
        await clock.to(at("2026-11-21T23:59:00.000001"))
        reservation = await running.reserve(CAP)
        await running.settle(reservation, reservation.max_cost)
        error = await refusal(running)
        assert isinstance(error, SpendCapReached)
        assert error.retry_after == 60
        await clock.to(at("2026-11-21T23:59:59.999999"))
        error = await refusal(running, 1)
        assert isinstance(error, SpendCapReached)
        assert error.retry_after == 1
        await clock.forward(1)
        assert await refusal(running) is None
        assert await books.spend(day="2026-11-21") == (CAP, 0)


async def test_a_cap_full_of_running_requests_has_a_short_retry_after(
    redis_url: str, clock: Clock, books: Books
) -> None:
    """Reserved money becomes free when its requests end, not at midnight."""
    async with slow_motion(redis_url, (30, 20)) as running:
        settled = await running.reserve(CAP // 4)
        await running.settle(settled, settled.max_cost)
        reserved = await running.reserve(CAP // 2)
        error = await refusal(running, CAP // 2)
        assert isinstance(error, SpendCapReached)
        assert error.retry_after == 2
        assert "Running requests" in error.message
        error = await refusal(running, CAP)  # the settled sum alone refuses it
        assert error is not None
        assert error.retry_after == 86_400 - 12 * 3600
        await running.settle(reserved, 0)
        await clock.forward(2 * SECOND)
        await running.settle(await running.reserve(CAP // 2), 0)


async def test_the_day_may_end_before_running_requests_do(redis_url: str, clock: Clock) -> None:
    async with slow_motion(redis_url, (30, 20)) as running:
        await clock.to(at("2026-11-21T23:59:59"))
        reserved = await running.reserve(CAP)
        error = await refusal(running)
        assert isinstance(error, SpendCapReached)
        assert error.retry_after == 1
        await clock.forward(SECOND)
        assert await refusal(running) is None
        await running.settle(reserved, 0)


async def test_a_request_that_fits_beside_the_settled_sum_need_not_wait_for_midnight(
    redis_url: str, clock: Clock
) -> None:
    """Once the running request has ended, it fits to the nano-euro."""
    async with slow_motion(redis_url, (30, 20)) as running:
        settled = await running.reserve(10)
        await running.settle(settled, 10)
        reserved = await running.reserve(1)
        error = await refusal(running, CAP - 10)
        assert error is not None
        assert error.retry_after == 2
        await running.settle(reserved, 0)
        await running.settle(await running.reserve(CAP - 10), 0)


async def test_there_is_no_retry_after_if_waiting_does_not_help(redis_url: str, clock: Clock) -> None:
    """A request that costs more than a whole day's cap cannot pass on any day."""
    async with slow_motion(redis_url, (30, 20)) as running:
        error = await refusal(running, CAP + 1)
        assert isinstance(error, SpendCapReached)
        assert error.retry_after is None
