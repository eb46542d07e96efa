"""Admission and settlement as the gateway calls them. tests/lua/inference tests the rules of their scripts."""

import hashlib
import random
from collections.abc import Iterator

import pytest
import redis

from gateway.accounts.records import AppLimits
from gateway.errors import (
    AppCapReached,
    AppRateLimited,
    Headers,
    ServiceError,
    SpendCapReached,
    UserCapReached,
)
from gateway.inference.spend import scripts
from gateway.inference.spend.admission import RedisClock
from gateway.keys import partition_tag, user_hash
from gateway.redis.client import Script
from gateway.settings.prices import FOREVER, Price, Tariff
from tests.gateway.inference.admissions import CAP, AdmissionProcess, Books, admission_process
from tests.lua.scripts import CLOCK, SECOND, at, on_test_clock, set_clock


@pytest.mark.parametrize(("cost", "settled"), [(0, 0), (700, 700), (1001, 1000)])
async def test_reserved_then_settled(process: AdmissionProcess, books: Books, cost: int, settled: int) -> None:
    reservation = await process.reserve(1000)
    assert await books.spend() == (0, 1000)
    assert (reservation.account, reservation.max_cost) == ("acc_one", 1000)
    await process.settle(reservation, cost)
    assert await books.spend() == (settled, 0)
    assert await books.closed()


@pytest.mark.parametrize(("wait", "life"), [(10.0, 360), (100.0, 630), (1_000_000.0, 1230)])
async def test_its_life_covers_the_total_timeout_and_the_waits_for_permits(
    redis_url: str, books: Books, wait: float, life: int
) -> None:
    """Otherwise it would be settled to its maximum while the request runs."""
    async with admission_process(redis_url, wait=wait) as process:
        reservation = await process.reserve(1000)
        seconds, micros = await books.client.time()
        expires = await books.client.zscore(f"{partition_tag('acc_one')}:leases", reservation.id)
        assert expires is not None
        assert abs(expires / 1000 - (seconds + micros / 1e6) - life) < 2
        await process.settle(reservation, 0)


@pytest.mark.parametrize("user", ["é" * 400, "a b\r\nc", "{p09}:window", "ana@example.com"])
async def test_a_users_id_never_reaches_redis(process: AdmissionProcess, books: Books, user: str) -> None:
    reservation = await process.reserve(1000, user, limits=AppLimits(userDailyEuro="0.01"))
    names = await books.client.keys("*")
    assert len([n for n in names if ":window:user:shop:" in n]) == 1
    stored = " ".join([*names, *(await books.open()).values()])
    assert user_hash(user) in stored
    assert user not in stored
    assert reservation.record is not None
    assert reservation.record.user == user_hash(user)
    await process.settle(reservation, 0)


# -- RateLimit headers and Retry-After -----------------------------------------------------------------------


def rate_limit(headers: Headers) -> tuple[int, ...]:
    found = dict(headers)
    return tuple(int(found[b"ratelimit-" + name]) for name in (b"limit", b"remaining", b"reset"))


class Clock:
    """The clock that this process's admissions read as Redis's."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.to(at("2026-11-21T12:00:00"))

    def to(self, now: int) -> None:
        self.now = now
        set_clock(self.client, now)

    def forward(self, micros: int) -> None:
        self.to(self.now + micros)


@pytest.fixture
def clock(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    script = Script("inference/admit")
    script.source = on_test_clock("inference/admit")
    script.sha = hashlib.sha1(script.source.encode(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(scripts, "_ADMIT", script)
    with redis.Redis.from_url(redis_url) as client:
        yield Clock(client)
        client.delete(CLOCK)


async def test_the_headers_describe_the_tighter_limit(redis_url: str, clock: Clock) -> None:
    async with admission_process(redis_url, (4, 2)) as running:
        assert rate_limit((await running.admit(0, "ana")).headers) == (2, 1, 60)
        clock.forward(10 * SECOND)
        assert rate_limit((await running.admit(0, "ben")).headers) == (2, 1, 60)
        clock.forward(SECOND // 2)
        # Three of the app's four are used, and one of this user's two.
        assert rate_limit((await running.admit(0, "eve")).headers)[1:] in {(1, 50), (1, 60)}
        assert rate_limit((await running.admit(0, "ana")).headers)[1:] == (0, 50)
        with pytest.raises(AppRateLimited) as refused:
            await running.admit(0, "eve")
        assert rate_limit(refused.value.headers) == (4, 0, 50)
        assert refused.value.retry_after == 50


@pytest.mark.parametrize("limits", [(3, 3), (5, 2), (2, 3)])
async def test_a_request_passes_after_its_retry_after(redis_url: str, clock: Clock, limits: tuple[int, int]) -> None:
    """If both limits refuse it, it passes when both have a free slot."""
    chance = random.Random(repr(limits))
    async with admission_process(redis_url, limits) as running:
        refused = 0
        while refused < 20:
            clock.forward(chance.randrange(0, 20 * SECOND))
            user = chance.choice(["ana", "ben", "eve"])
            error = await running.refusal(user=user)
            if error is None:
                continue
            refused += 1
            assert error.retry_after is not None
            assert 1 <= error.retry_after <= 60
            clock.forward(error.retry_after * SECOND)
            assert await running.refusal(user=user) is None


RUNNING, FULL = "Running requests", "00:00 UTC"
TOO_DEAR, ZERO = "for a whole day; shorten the prompt", "cap is 0, so no request passes; ask"


def assert_refused(
    error: ServiceError | None, kind: type[ServiceError], retry_after: int | None, why: str = FULL
) -> None:
    assert isinstance(error, kind)
    assert error.retry_after == retry_after
    assert [words for words in (RUNNING, FULL, TOO_DEAR, ZERO) if words in error.message] == [why]


async def test_a_full_day_ends_at_midnight(process: AdmissionProcess, clock: Clock, books: Books) -> None:
    clock.to(at("2026-11-21T23:59:00.000001"))
    assert await process.refusal(CAP) is None
    assert_refused(await process.refusal(), SpendCapReached, 60)
    clock.to(at("2026-11-21T23:59:59.999999"))
    assert_refused(await process.refusal(1), SpendCapReached, 1)
    clock.forward(1)
    assert await process.refusal() is None
    assert await books.spend(day="2026-11-21") == (CAP, 0)


@pytest.mark.parametrize(
    ("limits", "cap", "kind"),
    [
        (None, CAP, SpendCapReached),
        (AppLimits(dailyEuro="0.00005"), 50_000, AppCapReached),
        (AppLimits(userDailyEuro="0.00001"), 10_000, UserCapReached),
    ],
)
async def test_a_cap_full_of_running_requests_has_a_short_retry_after(
    process: AdmissionProcess, clock: Clock, limits: AppLimits | None, cap: int, kind: type[ServiceError]
) -> None:
    """Reserved money becomes free when its requests end, not at midnight."""
    assert await process.refusal(10, limits=limits) is None
    running = await process.reserve(1, limits=limits)
    assert_refused(await process.refusal(cap - 10, limits=limits), kind, 2, RUNNING)
    assert_refused(await process.refusal(cap - 9, limits=limits), kind, 12 * 3600)  # the settled sum alone refuses it
    await process.settle(running, 0)
    assert await process.refusal(cap - 10, limits=limits) is None
    assert_refused(await process.refusal(1, limits=limits), kind, 12 * 3600)


async def test_the_day_may_end_before_running_requests_do(process: AdmissionProcess, clock: Clock) -> None:
    clock.to(at("2026-11-21T23:59:59"))
    reserved = await process.reserve(CAP)
    error = await process.refusal()
    assert isinstance(error, SpendCapReached)
    assert error.retry_after == 1
    clock.forward(SECOND)
    assert await process.refusal() is None
    await process.settle(reserved, 0)


async def test_a_request_above_a_whole_days_cap(process: AdmissionProcess, clock: Clock) -> None:
    """It cannot pass on any day, unless the account holder raises a cap of an app or of its users."""
    assert_refused(await process.refusal(CAP + 1), SpendCapReached, None, TOO_DEAR)
    limits = AppLimits(dailyEuro="0.00005", userDailyEuro="0.00001")
    for max_cost, kind in ((10_001, UserCapReached), (50_001, AppCapReached)):
        assert_refused(await process.refusal(max_cost, limits=limits), kind, 12 * 3600, TOO_DEAR)
    assert_refused(await process.refusal(1, limits=AppLimits(dailyEuro="0")), AppCapReached, 12 * 3600, ZERO)


# -- prices that change: Redis's clock decides ---------------------------------------------------------------------

MODEL = "gpt-oss-120b"


async def test_a_process_whose_estimate_is_late_reserves_at_the_new_price(redis_url: str, books: Books) -> None:
    seconds, micros = await books.client.time()
    now = seconds * 1000 + micros // 1000
    tariffs = (Tariff({MODEL: Price(1, 1)}, 0, now - 500), Tariff({MODEL: Price(9, 9)}, now - 500, FOREVER))
    clock = RedisClock()
    clock.reset(now - 1_000)
    async with admission_process(redis_url, tariffs=tariffs, clock=clock) as process:
        reservation = await process.reserve(MODEL)
        assert (reservation.max_cost, reservation.tariff) == (9, tariffs[1])
        assert await books.spend() == (0, 9), "the call at the old price reserved nothing"
        assert await books.passed() == 1
        await process.settle(reservation, 9)
    assert await books.closed()
