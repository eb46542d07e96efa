"""Admission and settlement as the gateway calls them. tests/lua/inference tests the rules of their scripts."""

import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress

import pytest
import redis

from gateway.accounts.records import AppLimits
from gateway.cancellation import end_if_canceled
from gateway.errors import (
    AppCapReached,
    AppRateLimited,
    Headers,
    ServiceError,
    SpendCapReached,
    UserCapReached,
    UserRateLimited,
)
from gateway.inference.spend import scripts
from gateway.inference.spend.admission import Admitted, RedisClock
from gateway.keys import app_spend_fields, partition_tag, spend_key, user_hash, user_spend_prefix
from gateway.redis.client import Script
from gateway.settings.prices import FOREVER, Price, Tariff, tariff_at
from tests.gateway.inference.admissions import CAP, AdmissionProcess, Books, admission_process
from tests.lua.scripts import CLOCK, SECOND, at, on_test_clock, set_clock
from workers.monitors.run import settle_overdue


@pytest.mark.parametrize(("cost", "settled"), [(0, 0), (700, 700), (1001, 1000)])
async def test_reserved_then_settled(process: AdmissionProcess, books: Books, cost: int, settled: int) -> None:
    reservation = await process.reserve(1000)
    assert await books.spend() == (0, 1000)
    assert (reservation.account, reservation.max_cost) == ("acc_one", 1000)
    await process.settle(reservation, cost)
    assert await books.spend() == (settled, 0)
    assert await books.closed()


async def test_a_faulty_request_reserves_nothing(process: AdmissionProcess, books: Books) -> None:
    admitted = await process.admit(0)
    assert admitted.reservation is None
    assert await books.closed()
    assert await books.passed() == 1


async def test_its_life_is_the_total_timeout_and_a_minute(process: AdmissionProcess, books: Books) -> None:
    reservation = await process.reserve(1000)
    seconds, micros = await books.client.time()
    expires = await books.client.zscore(f"{partition_tag('acc_one')}:leases", reservation.id)
    assert expires is not None
    assert abs(expires / 1000 - (seconds + micros / 1e6) - 360) < 2
    await process.settle(reservation, 0)


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


async def test_users_with_different_ids_have_separate_windows(process: AdmissionProcess, books: Books) -> None:
    for user in ("ana", "Ana", "ana ", "a:na", "\0"):
        await process.admit(0, user)
    assert len([n for n in await books.client.keys("*") if ":window:user:" in n]) == 5


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


async def test_the_headers_of_a_limited_user(redis_url: str, clock: Clock) -> None:
    async with admission_process(redis_url, (30, 2)) as running:
        await running.admit(0)
        clock.forward(SECOND)
        await running.admit(0)
        clock.forward(1)
        with pytest.raises(UserRateLimited) as refused:
            await running.admit(0)
        # 58.999999 seconds, rounded up, so that a caller who waits that long passes.
        assert rate_limit(refused.value.headers) == (2, 0, 59)
        assert refused.value.retry_after == 59


@pytest.mark.parametrize("limits", [(3, 3), (3, 2), (5, 2), (2, 3), (1, 1)])
async def test_a_request_passes_after_its_retry_after(redis_url: str, clock: Clock, limits: tuple[int, int]) -> None:
    """If both limits refuse it, it passes when both have a free slot."""
    chance = random.Random(repr(limits))
    async with admission_process(redis_url, limits) as running:
        refused = 0
        while refused < 30:
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


def assert_refused(error: ServiceError | None, kind: type[ServiceError], retry_after: int | None) -> None:
    assert isinstance(error, kind)
    assert error.retry_after == retry_after
    assert ("Running requests" in error.message) == (retry_after == 2)
    assert ("00:00 UTC" in error.message) == (retry_after != 2)


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
    assert_refused(await process.refusal(cap - 10, limits=limits), kind, 2)
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
    assert_refused(await process.refusal(CAP + 1), SpendCapReached, None)
    limits = AppLimits(dailyEuro="0.00005", userDailyEuro="0.00001")
    for max_cost, kind in ((10_001, UserCapReached), (50_001, AppCapReached)):
        assert_refused(await process.refusal(max_cost, limits=limits), kind, 12 * 3600)


# -- the caps of an app and of its users ---------------------------------------------------------------------


async def code(at: AdmissionProcess, limits: AppLimits | None, max_cost: int, user: str = "ana", **of: str) -> str:
    """Returns why a request is refused, or `ok`. A request that passes costs its maximum."""
    error = await at.refusal(max_cost, user, limits=limits, **of)
    return "ok" if error is None else error.code


async def test_the_caps_are_checked_in_the_order_account_app_user(process: AdmissionProcess) -> None:
    limits = AppLimits(dailyEuro="0.00002", userDailyEuro="0.00001")
    assert await code(process, limits, 10_000) == "ok"
    assert await code(process, limits, 1) == "USER_CAP_REACHED"
    assert await code(process, limits, 10_000, "ben") == "ok"
    assert await code(process, limits, 1) == "APP_CAP_REACHED"
    assert await code(process, limits, 0, "eve") == "APP_CAP_REACHED"  # a faulty request checks whether the cap is full
    assert await code(process, None, CAP - 20_000, app="blog") == "ok"
    assert await code(process, limits, 1) == "SPEND_CAP_REACHED"


async def test_a_new_cap_counts_the_app_since_midnight_and_its_users_from_now_on(process: AdmissionProcess) -> None:
    assert await code(process, None, 30_000) == "ok"
    assert await code(process, AppLimits(dailyEuro="0.00003"), 1) == "APP_CAP_REACHED"
    assert await code(process, AppLimits(dailyEuro="0.000031", userDailyEuro="0.000001"), 1_000) == "ok"
    assert await code(process, AppLimits(userDailyEuro="0.000001"), 1) == "USER_CAP_REACHED"
    assert await code(process, None, 1) == "ok"


@pytest.mark.parametrize("max_cost", [0, 1])
async def test_a_cap_of_0_lets_nothing_pass(process: AdmissionProcess, books: Books, max_cost: int) -> None:
    assert await code(process, AppLimits(dailyEuro="0"), max_cost) == "APP_CAP_REACHED"
    assert await code(process, AppLimits(userDailyEuro="0"), max_cost) == "USER_CAP_REACHED"
    assert not await books.client.keys("*")


APPS, USERS = ("shop", "blog"), ("ana", "ben", "eve")
LIFE_MS = 30  # milliseconds, of a gateway that forgets its reservations
ROUNDS = 8  # of 20 requests at once


class Attack:
    """Gateways under attack, whose settlements come late or never. `limits` are the account holder's."""

    def __init__(self, books: Books, day: str) -> None:
        self.books, self.day = books, day
        self.limits = AppLimits(dailyEuro="0.004", userDailyEuro="0.0015")
        self.verdicts: Counter[str] = Counter()
        self.chance = random.Random(20_261_122)

    async def ask(self, at: AdmissionProcess) -> None:
        app, user = self.chance.choice(APPS), self.chance.choice(USERS)
        max_cost = self.chance.choice([0, 1, 40_000, 90_000, 333_333, 2_000_000])
        try:
            admitted = await at.admit(max_cost, user, app=app, limits=self.limits)
        except (SpendCapReached, AppCapReached, UserCapReached) as error:
            self.verdicts[error.code] += 1
            return
        self.verdicts["ok"] += 1
        if admitted.reservation is None or at.admission._life == LIFE_MS:
            return  # forgotten: a monitors worker ends it
        await asyncio.sleep(self.chance.choice([0, 0, 0.01]))
        cost = self.chance.choice([0, 1, max_cost // 3, max_cost, max_cost * 2])
        settling = asyncio.create_task(at.settle(admitted.reservation, cost))
        if self.chance.random() < 0.2:
            await asyncio.sleep(0)
            settling.cancel()  # the gateway's queue repeats it
        with suppress(asyncio.CancelledError):
            await settling

    async def spends(self) -> dict[tuple[str, ...], int]:
        """Returns the sums of settled and reserved money, by app, and by app and user."""
        async with self.books.client.pipeline(transaction=True) as pipe:
            pipe.hgetall(spend_key("acc_one", self.day))
            payers = [(app, user) for app in APPS for user in USERS]
            for app, user in payers:
                pipe.hgetall(f"{user_spend_prefix('acc_one', app, user_hash(user))}:{self.day}")
            account, *users = await pipe.execute()
        by_app = {(app,): sum(int(account.get(name, 0)) for name in app_spend_fields(app)) for app in APPS}
        return {**by_app, **{payer: sum(map(int, spend.values())) for payer, spend in zip(payers, users, strict=True)}}

    async def watch(self) -> None:
        """Checks that no payer exceeds its cap, and that one above a lowered cap spends no more."""
        before = await self.spends()
        while True:
            end_if_canceled()
            after = await self.spends()
            for payer, spend in after.items():
                cap = self.limits.cap if len(payer) == 1 else self.limits.user_cap
                assert 0 <= spend <= max(cap or 0, before[payer]), payer
            before = after
            await asyncio.sleep(0.003)

    async def run(self, processes: list[AdmissionProcess]) -> None:
        watching = asyncio.create_task(self.watch())
        for _ in range(ROUNDS):
            await asyncio.gather(*[self.ask(self.chance.choice(processes)) for _ in range(20)])
        await settle_overdue(processes[0].store)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def test_caps_hold_whatever_gateways_do(redis_url: str, books: Books) -> None:
    async with asyncio.timeout(120), AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(admission_process(redis_url, (10**6, 10**6))) for _ in range(3)]
        processes[2].admission._life = LIFE_MS
        attack = Attack(books, await books.today())
        await attack.run(processes)
        assert {"ok", "APP_CAP_REACHED", "USER_CAP_REACHED"} <= attack.verdicts.keys()
        for app_cap, user_cap, passes in (("0.02", "0.008", True), ("0.005", "0", False)):
            attack.limits = AppLimits(dailyEuro=app_cap, userDailyEuro=user_cap)
            attack.verdicts.clear()
            await attack.run(processes)
            assert bool(attack.verdicts["ok"]) == passes, attack.verdicts
        while not await books.closed():
            await asyncio.sleep(LIFE_MS / 1000)
            await settle_overdue(processes[0].store)
        # The account's sum equals its apps' sums to the nano-euro, and an app's equals its users'.
        total, reserved = await books.spend()
        spends = await attack.spends()
        assert (total, reserved) == (sum(spends[app,] for app in APPS), 0)
        assert total <= CAP
        for app in APPS:
            assert spends[app,] == sum(spends[app, user] for user in USERS)


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


async def test_all_processes_change_the_price_at_the_same_moment(redis_url: str, books: Books) -> None:
    seconds, micros = await books.client.time()
    change = seconds * 1000 + micros // 1000 + 1_000
    tariffs = (Tariff({MODEL: Price(1, 1)}, 0, change), Tariff({MODEL: Price(9, 9)}, change, FOREVER))
    async with AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(admission_process(redis_url, tariffs=tariffs)) for _ in range(3)]
        reservations = []
        while time.time() * 1000 < change + 300:
            reservations += await asyncio.gather(*(process.reserve(MODEL) for process in processes))
        for each in reservations:
            await processes[0].settle(each, each.max_cost)
    for each in reservations:
        assert each.record is not None
        assert each.tariff is tariff_at(tariffs, each.record.expires - 360_000)
        assert each.max_cost == each.tariff.prices[MODEL].input
    assert {each.max_cost for each in reservations} == {1, 9}
    assert await books.spend() == (sum(each.max_cost for each in reservations), 0)
    assert await books.closed()
