"""Admission and settlement as the gateway calls them. tests/lua/inference tests the rules of their scripts."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.errors import AppRateLimited, SpendCapReached, UserRateLimited
from gateway.inference.spend.admission import Admitted
from gateway.redis.partitions import partition_tag
from tests.gateway.inference.admissions import CAP, AdmissionProcess, Books, admission_process
from tests.support.gateway_process import App as RunningApp


@pytest.mark.parametrize(("cost", "settled"), [(0, 0), (700, 700), (1000, 1000), (1001, 1000), (10**15, 1000)])
async def test_reserved_then_settled(here: AdmissionProcess, books: Books, cost: int, settled: int) -> None:
    reservation = await here.reserve(1000)
    assert await books.spend() == (0, 1000)
    assert (reservation.account, reservation.max_cost) == ("acc_one", 1000)
    await here.settle(reservation, cost)
    assert await books.spend() == (settled, 0)
    assert await books.closed()


async def test_a_faulty_request_reserves_nothing(here: AdmissionProcess, books: Books) -> None:
    admitted = await here.admit(0)
    assert admitted.reservation is None
    assert await books.closed()
    assert await books.passed() == 1


async def test_the_lease_is_the_total_timeout_and_a_minute(here: AdmissionProcess, books: Books) -> None:
    reservation = await here.reserve(1000)
    seconds, micros = await books.client.time()
    lease = await books.client.zscore(f"{partition_tag('acc_one')}:leases", reservation.id)
    assert lease is not None
    assert abs(lease / 1000 - (seconds + micros / 1e6) - 360) < 2
    await here.settle(reservation, 0)


async def test_gateways_share_the_cap_and_the_windows(redis_url: str, books: Books) -> None:
    async with AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(admission_process(redis_url)) for _ in range(3)]
        asks = [processes[n % 3].admit(CAP // 10 + 1, user=f"u{n}") for n in range(90)]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        admitted = [each for each in answers if isinstance(each, Admitted)]
        assert len(admitted) == 9
        assert all(isinstance(each, Admitted | SpendCapReached) for each in answers)
        assert await books.spend() == (0, 9 * (CAP // 10 + 1))
        assert await books.passed() == 9
        await asyncio.gather(*[processes[0].settle(each.reservation, 1) for each in admitted if each.reservation])
        assert await books.spend() == (9, 0)


async def test_exactly_the_limit_of_simultaneous_requests_passes(redis_url: str) -> None:
    async with admission_process(redis_url, (30, 20)) as first, admission_process(redis_url, (30, 20)) as second:
        asks = [each.admit(0, user) for _ in range(25) for each in (first, second) for user in ("ana", "ben")]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert sum(isinstance(each, Admitted) for each in answers) == 30
        assert all(isinstance(each, Admitted | AppRateLimited | UserRateLimited) for each in answers)


@pytest.mark.parametrize("user", ["é" * 400, "a b\r\nc", "{p09}:window", "\0", "*"])
async def test_a_users_id_never_reaches_redis(here: AdmissionProcess, books: Books, user: str) -> None:
    await here.admit(0, user)
    names = await books.client.keys("*")
    assert len([n for n in names if ":window:user:shop:" in n]) == 1
    assert not [n for n in names if user.encode(errors="replace").decode() in n and len(user) > 1]


async def test_users_with_different_ids_have_separate_windows(here: AdmissionProcess, books: Books) -> None:
    for user in ("ana", "Ana", "ana ", "a:na"):
        await here.admit(0, user)
    assert len([n for n in await books.client.keys("*") if ":window:user:" in n]) == 4


@pytest.mark.asyncio(loop_scope="session")
async def test_a_user_id_that_is_not_valid_text(app: RunningApp) -> None:
    """JSON can contain half a character. It is refused or counted as a user, but never causes a crash."""
    response = await app.ask("x", token=app.token("\ud800"))
    assert response.status_code in (200, 401)
