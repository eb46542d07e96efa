"""Admission and settlement as the gateway calls them, also with faults of Redis, of the network and of the caller.

Money moves once, and none stays reserved. tests/lua/inference tests the rules of the scripts.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import msgspec
import pytest
import redis

from gateway.accounts.records import AppLimits
from gateway.errors import (
    AppCapReached,
    AppRateLimited,
    BackboneUnavailable,
    Headers,
    NotReplicated,
    ServiceError,
    SpendCapReached,
    UserCapReached,
)
from gateway.events.notices import NoticeChoices, Notices
from gateway.inference.spend import scripts
from gateway.inference.spend.admission import Admitted, PendingSettlement, RedisClock
from gateway.inference.spend.budget import BudgetWatch
from gateway.keys import partition_tag, stream_key, user_hash
from gateway.redis import client as store_module
from gateway.redis.client import Script
from gateway.settings.prices import FOREVER, Price, Tariff
from tests.gateway.inference.admissions import CAP, EVALSHA, AdmissionProcess, Books, admission_process
from tests.lua.scripts import CLOCK, SECOND, at, on_test_clock, set_clock
from tests.support.background import cancel
from tests.support.polling import wait_until
from tests.support.tcp_proxy import Proxy


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
    clock.to(at("2026-11-21T23:59:59"))
    running = await process.reserve(CAP)
    assert_refused(await process.refusal(), SpendCapReached, 1, RUNNING)
    await process.settle(running, CAP)
    clock.to(at("2026-11-21T23:59:00.000001"))
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


async def test_a_lost_admission_holds_no_money(proxy: Proxy, remote: AdmissionProcess, books: Books) -> None:
    await remote.admit(0)
    proxy.lose_answer = EVALSHA
    with pytest.raises(BackboneUnavailable):
        await remote.admit(1000)
    await wait_until(lambda: remote.retries() >= 1)
    await wait_until(books.closed)
    assert await books.spend() == (0, 0)


class Ahead(RedisClock):
    """A belief that Redis's clock is 800 ms later than it is."""

    def at(self, monotonic: float) -> int:
        return super().at(monotonic) + 800


@pytest.mark.parametrize("admission_options", [{}, {"clock": Ahead(), "clock_error": 1.0}], ids=["right", "ahead"])
async def test_an_admission_that_arrives_late_holds_no_money(
    proxy: Proxy, remote: AdmissionProcess, books: Books
) -> None:
    """The network delivers the request after its caller was refused and its release was written.

    This process may believe that Redis's clock is later than it is, and so let the request arrive later.
    """
    await remote.admit(0)
    proxy.hold_requests = b"acc_one"
    asking = asyncio.create_task(remote.admit(1000))
    await wait_until(lambda: proxy.held)
    proxy.hold_requests = None  # later requests pass
    with pytest.raises(BackboneUnavailable):
        await asking
    await wait_until(lambda: not remote.admission.pending)
    proxy.let_go()
    await wait_until(lambda: len(proxy.links) == 1)  # the late one was taken, and its connection closed
    await wait_until(books.closed)
    assert await books.spend() == (0, 0)


@pytest.mark.parametrize("moment", ["at once", "before Redis", "after Redis"])
async def test_canceled_during_admission(proxy: Proxy, remote: AdmissionProcess, books: Books, moment: str) -> None:
    await remote.admit(0)
    if moment == "before Redis":
        proxy.hold_requests = EVALSHA
    elif moment == "after Redis":
        proxy.hold_answers = EVALSHA
    asking = asyncio.create_task(remote.admit(1000))
    await (asyncio.sleep(0) if moment == "at once" else wait_until(lambda: proxy.held))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    proxy.let_go()
    await wait_until(lambda: not remote.admission.pending)
    await wait_until(books.closed)
    assert await books.spend() == (0, 0)
    assert await books.passed() <= 2


async def test_settlements_wait_for_redis(proxy: Proxy, remote: AdmissionProcess, books: Books) -> None:
    """The first one of a reservation counts."""
    reservations = [await remote.reserve(1000) for _ in range(5)]
    proxy.go_down()
    for n, reservation in enumerate(reservations):
        await remote.settle(reservation, 100 + n)
        await remote.settle(reservation, 0)
    assert await books.spend() == (0, 5000)
    proxy.down = False
    await wait_until(books.closed)
    assert await books.spend() == (510, 0)
    await wait_until(lambda: not remote.admission.pending)
    assert remote.retries() >= 5


@pytest.mark.parametrize("moment", ["at once", "before Redis", "after Redis", "lost on the way", "while connecting"])
async def test_canceled_during_settlement(proxy: Proxy, remote: AdmissionProcess, books: Books, moment: str) -> None:
    reservation = await remote.reserve(1000)
    match moment:
        case "before Redis":
            proxy.hold_requests = EVALSHA
        case "after Redis":
            proxy.hold_answers = EVALSHA
        case "lost on the way":
            proxy.swallowing = True
        case "while connecting":
            links = {*proxy.links}
            proxy.cut()
            # The connection that watches the server returns soon; the others return with the next call.
            await wait_until(lambda: not proxy.links & links)
    settling = asyncio.create_task(remote.settle(reservation, 400))
    await (wait_until(lambda: proxy.held) if "Redis" in moment else asyncio.sleep(0.1 if proxy.swallowing else 0))
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    proxy.swallowing = False
    proxy.let_go()
    await wait_until(books.closed)
    assert await books.spend() == (400, 0)


@pytest.mark.parametrize("admission_options", [{"max_pending": 3}], ids=["3"])
async def test_the_number_of_pending_settlements_is_limited(
    proxy: Proxy, remote: AdmissionProcess, books: Books
) -> None:
    """The oldest ones beyond the limit stay reserved until they expire."""
    reservations = [await remote.reserve(1000) for _ in range(5)]
    proxy.go_down()
    for reservation in reservations:
        await remote.settle(reservation, 10)
        assert remote.admission.pending <= 3
    proxy.down = False
    await wait_until(lambda: not remote.admission.pending)
    assert await books.spend() == (30, 2000)
    assert set(await books.open()) == {r.id for r in reservations[:2]}
    for reservation in reservations[:2]:
        await remote.settle(reservation, reservation.max_cost)
    assert await books.spend() == (2030, 0)


async def test_a_partition_that_refuses_does_not_delay_the_others(
    proxy: Proxy, remote: AdmissionProcess, books: Books
) -> None:
    """This happens while one node of a cluster is down. The settlements of other nodes are written."""
    assert partition_tag("acc_one") != partition_tag("acc_other")
    waiting = [await remote.reserve(1000) for _ in range(30)]
    fine = await remote.reserve(1000, app="blog", account="acc_other")
    proxy.go_down()
    for reservation in waiting:
        await remote.settle(reservation, 10)
    await remote.settle(fine, 20)
    key = f"{partition_tag('acc_one')}:reservations"
    await books.client.rename(key, "aside")
    await books.client.set(key, "not a hash", ex=60)
    proxy.down = False
    try:
        await wait_until(lambda: books.closed("acc_other"), timeout=3)
        assert await books.spend("acc_other") == (20, 0)
    finally:
        await books.client.rename("aside", key)
    await wait_until(books.closed)
    assert await books.spend() == (300, 0)


@pytest.mark.parametrize("admission_options", [{"max_pending": 1}], ids=["1"])
async def test_an_overflow_during_a_repetition_does_not_stop_the_queue(
    proxy: Proxy, remote: AdmissionProcess, books: Books
) -> None:
    """The overflow removes the settlement that is being repeated."""
    one, two = [await remote.reserve(1000) for _ in range(2)]
    proxy.go_down()
    await remote.settle(one, 10)
    proxy.hold_requests, proxy.down = EVALSHA, False
    await wait_until(lambda: proxy.held)
    remote.admission._settle_later(PendingSettlement(two, 10))
    proxy.go_down()
    proxy.let_go()
    proxy.down = False
    await wait_until(lambda: not remote.admission.pending)
    await remote.settle(one, 10)
    assert await books.spend() == (20, 0)


# -- writes that no replica has ------------------------------------------------------------------------------------


async def test_a_reservation_that_a_failover_lost_is_settled_once(
    process: AdmissionProcess, books: Books, redis_url: str
) -> None:
    kept = await process.reserve(1_000_003)
    with redis.Redis.from_url(redis_url) as client:
        replicated = {name: client.dump(name) for name in client.keys("*")}
        lost = await process.reserve(2_000_033)
        client.flushall()
        for name, value in replicated.items():
            client.restore(name, 60_000, value)
    assert await books.spend() == (0, 1_000_003)
    await process.settle(kept, 7)
    for _ in range(3):
        await process.settle(lost, 1_234_567)
    assert await books.spend() == (1_234_574, 0)
    assert await books.closed()
    assert process.counted("gateway_reservations_lost_total") == 1


async def test_a_reservation_that_no_replica_has_is_refused_and_released(
    process: AdmissionProcess, books: Books, redis_url: str
) -> None:
    """The server has no replica, and `GATEWAY_REDIS_WAIT` is 1."""
    running = await process.reserve(500)
    async with admission_process(redis_url, replicas=1) as careful:
        began = asyncio.get_running_loop().time()
        *refusals, admitted = await asyncio.gather(
            *[careful.admit(1000, user=f"u{n}") for n in range(20)], careful.admit(0), return_exceptions=True
        )
        assert asyncio.get_running_loop().time() - began < store_module.COMMAND_SECONDS
        assert {type(refusal) for refusal in refusals} == {NotReplicated}
        assert (NotReplicated.status, NotReplicated.code) == (503, "BACKBONE_UNAVAILABLE")
        assert isinstance(admitted, Admitted)  # it reserves nothing
        await careful.settle(running, 7)  # does not wait
        await wait_until(books.closed)
        assert await books.spend() == (7, 0)


# -- notices about caps --------------------------------------------------------------------------------------------

ACCOUNT, SHOP = "acc_one", "shop"


class Watching:
    """An admission process whose caps are watched, and the notices that it queues."""

    def __init__(self, process: AdmissionProcess) -> None:
        self.process, self.notices = process, Notices(process.store)
        self.watch = process.admission._budget = BudgetWatch(self.notices)

    async def spend(self, cost: int, limits: AppLimits | None = None) -> None:
        """Reserves and settles so much, if the caps allow it."""
        with suppress(ServiceError):
            await self.process.settle(await self.process.reserve(cost, limits=limits), cost)

    async def queued(self, count: int) -> list[tuple[str, int]]:
        """Waits for so many notices. Returns the app and the level of each."""
        key = stream_key(partition_tag(ACCOUNT), "mails")
        await wait_until(lambda: self.process.store.client.xlen(key), holds=lambda length: length == count)
        await wait_until(lambda: not self.watch._waiting)
        entries = await self.process.store.client.xrange(key)
        assert len(entries) == count
        return [(fields["app"], msgspec.json.decode(fields["data"])["level"]) for _, fields in entries]


@pytest.fixture
async def watching(process: AdmissionProcess) -> AsyncIterator[Watching]:
    watching = Watching(process)
    await watching.notices.choose(ACCOUNT, "ada@example.com", NoticeChoices(budget=True))
    reporting = asyncio.create_task(watching.watch.keep_reporting())
    yield watching
    await cancel(reporting)


async def test_the_accounts_cap(watching: Watching) -> None:
    await watching.spend(CAP * 79 // 100)
    assert await watching.queued(0) == []
    await watching.spend(CAP // 100)
    assert await watching.queued(1) == [("", 80)]
    await watching.spend(CAP // 10)
    assert await watching.queued(1) == [("", 80)]
    await watching.spend(CAP // 5)  # is refused
    await watching.spend(CAP // 5)
    assert await watching.queued(2) == [("", 80), ("", 100)]


async def test_what_is_reserved_counts(watching: Watching) -> None:
    reservation = await watching.process.reserve(CAP)
    assert await watching.queued(1) == [("", 100)]
    await watching.process.settle(reservation, CAP * 85 // 100)
    await watching.spend(1)
    assert await watching.queued(1) == [("", 100)], "no lower level follows"


async def test_an_apps_cap(watching: Watching) -> None:
    limits = AppLimits(dailyEuro="0.01")
    cap = limits.cap
    assert cap is not None
    await watching.spend(cap * 9 // 10, limits)
    assert await watching.queued(1) == [(SHOP, 80)]
    await watching.spend(cap, limits)  # is refused
    assert await watching.queued(2) == [(SHOP, 80), (SHOP, 100)]


async def test_several_processes_and_a_restart_repeat_no_notice(watching: Watching) -> None:
    await watching.spend(CAP * 9 // 10)
    assert await watching.queued(1) == [("", 80)]
    watching.watch._reported.clear()
    for _ in range(3):
        await watching.spend(1)
    assert await watching.queued(1) == [("", 80)]
