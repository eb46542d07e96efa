"""Admission and settlement as the gateway calls them: what a network, a cancelled request or a Redis that is away
may do to them. The scripts' own rules are tested in `tests/lua`.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import redis.asyncio
from prometheus_client import CollectorRegistry

from gateway.accounts.records import Account, App
from gateway.errors import AppRateLimited, BackboneUnavailable, ServiceError, SpendCapReached, UserRateLimited
from gateway.inference import admission as admission_module
from gateway.inference.admission import Admission, Admitted, Reservation, Unwritten
from gateway.settings import RateLimits, Settings
from gateway.store import client as store_module
from gateway.store import scripts
from gateway.store.client import Store
from gateway.store.keys import spend_key, tag
from gateway.telemetry.metrics import Metrics
from tests.lua.scripts import CLOCK, SECOND, at, day_of, on_test_clock
from tests.polling import wait_until
from tests.proxy import Proxy
from tests.runner import App as RunningApp
from tests.servers import RedisServer

CAP = Settings().daily_caps["free"]
EVALSHA = b"EVALSHA"


def an_account(name: str = "acc_one", plan: str = "free") -> Account:
    return Account(id=name, name="One", plan=plan, createdAt="")


def an_app(name: str = "shop", owner: str = "acc_one") -> App:
    return App(id=name, name=name, account=owner, createdAt="")


class Desk:
    """One gateway's admission, with the work that runs beside it."""

    def __init__(self, url: str, limits: tuple[int, int]) -> None:
        self.metrics = Metrics()
        self.store = Store(url)
        settings = Settings(redis_url=url, rate_limits=RateLimits(*limits))
        self.admission = Admission(settings, self.store, self.metrics)

    async def admit(self, bound: int, user: str = "ana", **of: str) -> Admitted:
        owner = of.get("account", "acc_one")
        return await self.admission.admit(an_app(of.get("app", "shop"), owner), an_account(owner), user, bound)

    async def reserve(self, bound: int, user: str = "ana", **of: str) -> Reservation:
        reservation = (await self.admit(bound, user, **of)).reservation
        assert reservation is not None
        return reservation

    async def settle(self, reservation: Reservation, cost: int) -> None:
        await self.admission.settle(reservation, cost)

    def retries(self) -> float:
        return self.counted("gateway_settlement_retries_total")

    def counted(self, name: str) -> float:
        registry: CollectorRegistry = self.metrics.registry
        return registry.get_sample_value(name) or 0


@asynccontextmanager
async def desk(url: str, limits: tuple[int, int] = (10_000, 10_000)) -> AsyncIterator[Desk]:
    running = Desk(url, limits)
    tasks = [asyncio.create_task(running.admission.repeat_settlements())]
    try:
        yield running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await running.store.close()


@pytest.fixture
async def here(redis_url: str) -> AsyncIterator[Desk]:
    async with desk(redis_url) as running:
        yield running


@pytest.fixture
async def proxy(redis_url: str, valkey: RedisServer) -> AsyncIterator[Proxy]:
    async with Proxy(valkey.port) as proxy:
        yield proxy


@pytest.fixture
async def remote(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    """A gateway whose way to Redis a test can disturb, and whose patience is short."""
    monkeypatch.setattr(store_module, "ATTEMPT", 0.5)
    monkeypatch.setattr(admission_module, "IN_TIME", 0.5)
    async with desk(proxy.url) as running:
        yield running


class Books:
    """What stands in Redis, read beside the gateway."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.client = client

    async def today(self) -> str:
        return day_of((await self.client.time())[0] * SECOND)

    async def spend(self, owner: str = "acc_one", day: str = "") -> tuple[int, int]:
        """Settled and reserved, nano-euro."""
        key = spend_key(owner, day or await self.today())
        settled, reserved = await self.client.hmget(key, ["settled", "reserved"])
        return int(settled or 0), int(reserved or 0)

    async def open(self, owner: str = "acc_one") -> dict[str, str]:
        return await self.client.hgetall(f"{tag(owner)}:reservations")

    async def closed(self, owner: str = "acc_one") -> bool:
        leases = await self.client.zcard(f"{tag(owner)}:leases")
        return not await self.open(owner) and not leases and (await self.spend(owner))[1] == 0

    async def passed(self, name: str = "shop", owner: str = "acc_one") -> int:
        return await self.client.llen(f"{tag(owner)}:window:app:{name}")


@pytest.fixture
async def books(redis_url: str) -> AsyncIterator[Books]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield Books(client)


# -- what passes and what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize(("cost", "settled"), [(0, 0), (700, 700), (1000, 1000), (1001, 1000), (10**15, 1000)])
async def test_reserved_then_settled(here: Desk, books: Books, cost: int, settled: int) -> None:
    reservation = await here.reserve(1000)
    assert await books.spend() == (0, 1000)
    assert (reservation.account, reservation.bound) == ("acc_one", 1000)
    await here.settle(reservation, cost)
    assert await books.spend() == (settled, 0)
    assert await books.closed()


async def test_a_faulty_request_reserves_nothing(here: Desk, books: Books) -> None:
    admitted = await here.admit(0)
    assert admitted.reservation is None
    assert await books.closed()
    assert await books.passed() == 1


async def test_the_lease_is_the_total_timeout_and_a_minute(here: Desk, books: Books) -> None:
    reservation = await here.reserve(1000)
    seconds, micros = await books.client.time()
    lease = await books.client.zscore(f"{tag('acc_one')}:leases", reservation.id)
    assert lease is not None
    assert abs(lease / 1000 - (seconds + micros / 1e6) - 360) < 2
    await here.settle(reservation, 0)


async def test_gateways_share_the_cap_and_the_windows(redis_url: str, books: Books) -> None:
    async with AsyncExitStack() as stack:
        desks = [await stack.enter_async_context(desk(redis_url)) for _ in range(3)]
        asks = [desks[n % 3].admit(CAP // 10 + 1, user=f"u{n}") for n in range(90)]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        admitted = [each for each in answers if isinstance(each, Admitted)]
        assert len(admitted) == 9
        assert all(isinstance(each, Admitted | SpendCapReached) for each in answers)
        assert await books.spend() == (0, 9 * (CAP // 10 + 1))
        assert await books.passed() == 9
        await asyncio.gather(*[desks[0].settle(each.reservation, 1) for each in admitted if each.reservation])
        assert await books.spend() == (9, 0)


async def test_exactly_the_limit_passes_when_all_come_at_once(redis_url: str) -> None:
    async with desk(redis_url, (30, 20)) as first, desk(redis_url, (30, 20)) as second:
        asks = [each.admit(0, user) for _ in range(25) for each in (first, second) for user in ("ana", "ben")]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert sum(isinstance(each, Admitted) for each in answers) == 30
        assert all(isinstance(each, Admitted | AppRateLimited | UserRateLimited) for each in answers)


@pytest.mark.parametrize("user", ["é" * 400, "a b\r\nc", "{p00}:window", "\0", "*"])
async def test_a_users_id_never_reaches_redis(here: Desk, books: Books, user: str) -> None:
    await here.admit(0, user)
    names = await books.client.keys("*")
    assert len([n for n in names if ":window:user:shop:" in n]) == 1
    assert not [n for n in names if user.encode(errors="replace").decode() in n and len(user) > 1]


async def test_users_of_different_ids_have_windows_of_their_own(here: Desk, books: Books) -> None:
    for user in ("ana", "Ana", "ana ", "a:na"):
        await here.admit(0, user)
    assert len([n for n in await books.client.keys("*") if ":window:user:" in n]) == 4


# -- what the caller is told -------------------------------------------------------------------------------------


def told(headers: list[tuple[bytes, bytes]]) -> tuple[int, int, int]:
    found = dict(headers)
    return tuple(int(found[b"ratelimit-" + name]) for name in (b"limit", b"remaining", b"reset"))


class Clock:
    """Redis's clock, as this desk's scripts are told it."""

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
async def slow_motion(url: str, limits: tuple[int, int]) -> AsyncIterator[Desk]:
    """A desk on the test's clock."""
    async with desk(url, limits) as running:
        admit = scripts._ADMIT
        production = admit.source, admit.sha
        admit.source = on_test_clock("admit")
        admit.sha = hashlib.sha1(admit.source.encode(), usedforsecurity=False).hexdigest()
        try:
            yield running
        finally:
            admit.source, admit.sha = production


async def test_the_headers_tell_of_the_tighter_limit(redis_url: str, clock: Clock) -> None:
    async with slow_motion(redis_url, (4, 2)) as running:
        assert told((await running.admit(0, "ana")).headers) == (2, 1, 60)
        await clock.forward(10 * SECOND)
        assert told((await running.admit(0, "ben")).headers) == (2, 1, 60)
        await clock.forward(SECOND // 2)
        # Three of the app's four are used, and one of this user's two.
        assert told((await running.admit(0, "eve")).headers)[1:] in {(1, 50), (1, 60)}
        assert told((await running.admit(0, "ana")).headers)[1:] == (0, 50)
        with pytest.raises(AppRateLimited) as refused:
            await running.admit(0, "eve")
        assert told(refused.value.headers) == (4, 0, 50)
        assert refused.value.retry_after == 50


async def test_the_headers_of_a_limited_user(redis_url: str, clock: Clock) -> None:
    async with slow_motion(redis_url, (30, 2)) as running:
        await running.admit(0)
        await clock.forward(SECOND)
        await running.admit(0)
        await clock.forward(1)
        with pytest.raises(UserRateLimited) as refused:
            await running.admit(0)
        # 58.999999 seconds, rounded up: to wait that long must be enough.
        assert told(refused.value.headers) == (2, 0, 59)
        assert refused.value.retry_after == 59


async def refusal(running: Desk, bound: int = 0, user: str = "ana") -> ServiceError | None:
    try:
        admitted = await running.admit(bound, user)
    except ServiceError as error:
        return error
    if admitted.reservation:
        await running.settle(admitted.reservation, 0)
    return None


@pytest.mark.parametrize("limits", [(3, 3), (3, 2), (5, 2), (2, 3), (1, 1)])
async def test_whoever_waits_as_told_passes(redis_url: str, clock: Clock, limits: tuple[int, int]) -> None:
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
    """Both limits refuse: only after the later of the two can this caller pass."""
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
        await running.settle(reservation, reservation.bound)
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


async def test_a_cap_full_of_running_requests_invites_to_try_soon(redis_url: str, clock: Clock, books: Books) -> None:
    """The audit's 24 requests at once: what is only reserved comes free when those end, not at midnight."""
    async with slow_motion(redis_url, (30, 20)) as running:
        settled = await running.reserve(CAP // 4)
        await running.settle(settled, settled.bound)
        reserved = await running.reserve(CAP // 2)
        error = await refusal(running, CAP // 2)
        assert isinstance(error, SpendCapReached)
        assert error.retry_after == 2
        assert "still running" in error.message
        error = await refusal(running, CAP)  # what is settled alone is in its way
        assert error is not None
        assert error.retry_after == 86_400 - 12 * 3600
        await running.settle(reserved, 0)
        await clock.forward(2 * SECOND)
        await running.settle(await running.reserve(CAP // 2), 0)


async def test_a_settlement_without_its_reservation_is_counted(here: Desk, books: Books) -> None:
    """A failover that lost the reservation must not pass in silence."""
    reservation = await here.reserve(1000)
    await books.client.hdel(f"{tag('acc_one')}:reservations", reservation.id)
    await here.settle(reservation, 10)
    assert here.counted("gateway_reservations_lost_total") == 1
    await books.client.zrem(f"{tag('acc_one')}:leases", reservation.id)
    fine = await here.reserve(1000)
    await here.settle(fine, 10)
    assert here.counted("gateway_reservations_lost_total") == 1


async def test_no_wait_is_promised_where_waiting_does_not_help(redis_url: str, clock: Clock) -> None:
    """What costs more than a whole day's cap passes on no day."""
    async with slow_motion(redis_url, (30, 20)) as running:
        error = await refusal(running, CAP + 1)
        assert isinstance(error, SpendCapReached)
        assert error.retry_after is None


# -- Redis away --------------------------------------------------------------------------------------------------


async def test_no_redis_is_backbone_unavailable(proxy: Proxy, remote: Desk) -> None:
    proxy.go_down()
    with pytest.raises(BackboneUnavailable) as refused:
        await remote.admit(1000)
    assert (refused.value.status, refused.value.code) == (503, "BACKBONE_UNAVAILABLE")
    assert refused.value.retry_after


async def test_a_redis_that_does_not_answer(remote: Desk, proxy: Proxy, books: Books) -> None:
    await remote.admit(0)
    proxy.swallowing = True
    began = asyncio.get_running_loop().time()
    answers = await asyncio.gather(*[remote.admit(1000) for _ in range(20)], return_exceptions=True)
    assert all(isinstance(each, BackboneUnavailable) for each in answers)
    assert asyncio.get_running_loop().time() - began < 2
    proxy.swallowing = False
    proxy.cut()
    await wait_until(lambda: remote.retries() >= 20)
    assert await books.closed()


@pytest.mark.parametrize("lost", ["answer", "request"])
async def test_a_lost_admission_holds_no_money(proxy: Proxy, remote: Desk, books: Books, lost: str) -> None:
    await remote.admit(0)
    if lost == "answer":
        proxy.lose_answer = EVALSHA
        with pytest.raises(BackboneUnavailable):
            await remote.admit(1000)
    else:
        proxy.hold_requests = EVALSHA
        asking = asyncio.create_task(remote.admit(1000))
        await wait_until(lambda: proxy.held)
        proxy.cut()
        with pytest.raises(BackboneUnavailable):
            await asking
        proxy.let_go()
    await wait_until(lambda: remote.retries() >= 1)
    await wait_until(books.closed)
    assert await books.spend() == (0, 0)


async def test_an_admission_that_arrives_late_holds_no_money(proxy: Proxy, remote: Desk, books: Books) -> None:
    """A request kept by the network reaches Redis after the caller was refused, and its release was written."""
    await remote.admit(0)
    proxy.hold_requests = b"acc_one"
    asking = asyncio.create_task(remote.admit(1000))
    await wait_until(lambda: proxy.held)
    proxy.hold_requests = None  # later requests pass
    with pytest.raises(BackboneUnavailable):
        await asking
    await wait_until(lambda: not remote.admission._unwritten)
    proxy.let_go()
    await wait_until(lambda: len(proxy.links) == 1)  # the late one was taken, and its connection closed
    await wait_until(books.closed)
    assert await books.spend() == (0, 0)


@pytest.mark.parametrize("moment", ["at once", "before Redis", "after Redis"])
async def test_cancelled_during_admission(proxy: Proxy, remote: Desk, books: Books, moment: str) -> None:
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
    await wait_until(lambda: not remote.admission._unwritten)
    await wait_until(books.closed)
    assert await books.spend() == (0, 0)
    assert await books.passed() <= 2


async def test_a_settlement_waits_for_redis(proxy: Proxy, remote: Desk, books: Books) -> None:
    reservations = [await remote.reserve(1000) for _ in range(5)]
    proxy.go_down()
    for n, reservation in enumerate(reservations):
        await remote.settle(reservation, 100 + n)
    assert await books.spend() == (0, 5000)
    proxy.down = False
    await wait_until(books.closed)
    assert await books.spend() == (510, 0)
    await wait_until(lambda: not remote.admission._unwritten)
    assert remote.retries() >= 5


async def test_a_settlement_whose_answer_is_lost_counts_once(proxy: Proxy, remote: Desk, books: Books) -> None:
    reservation, other = await remote.reserve(1000), await remote.reserve(500)
    proxy.lose_answer = EVALSHA
    await remote.settle(reservation, 400)
    await wait_until(lambda: remote.retries() >= 1 and not remote.admission._unwritten)
    assert await books.spend() == (400, 500)
    await remote.settle(other, 0)


@pytest.mark.parametrize("moment", ["at once", "before Redis", "after Redis", "while connecting"])
async def test_cancelled_during_settlement(proxy: Proxy, remote: Desk, books: Books, moment: str) -> None:
    reservation = await remote.reserve(1000)
    match moment:
        case "before Redis":
            proxy.hold_requests = EVALSHA
        case "after Redis":
            proxy.hold_answers = EVALSHA
        case "while connecting":
            proxy.cut()
            await wait_until(lambda: not proxy.links)
    settling = asyncio.create_task(remote.settle(reservation, 400))
    await (wait_until(lambda: proxy.held) if "Redis" in moment else asyncio.sleep(0))
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    proxy.let_go()
    await wait_until(books.closed)
    assert await books.spend() == (400, 0)


async def test_the_first_of_many_ends_counts(here: Desk, books: Books) -> None:
    reservation = await here.reserve(1000)
    await here.settle(reservation, 300)
    await asyncio.gather(*[here.settle(reservation, cost) for cost in (0, 300, 999, 1000)])
    assert await books.spend() == (300, 0)


async def test_one_of_many_concurrent_ends_counts(here: Desk, books: Books) -> None:
    costs = [0, 111, 222, 333, 1000]
    for _ in range(20):
        before = (await books.spend())[0]
        reservation = await here.reserve(1000)
        await asyncio.gather(*[here.settle(reservation, cost) for cost in costs])
        after, reserved = await books.spend()
        assert after - before in costs
        assert reserved == 0


async def test_the_first_end_counts_while_redis_is_away(proxy: Proxy, remote: Desk, books: Books) -> None:
    reservation = await remote.reserve(1000)
    proxy.go_down()
    await remote.settle(reservation, 300)
    await remote.settle(reservation, 0)
    proxy.down = False
    await wait_until(books.closed)
    assert await books.spend() == (300, 0)


async def test_an_overflow_during_a_repetition_ends_nothing(
    proxy: Proxy, remote: Desk, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overflow removes the very settlement that is being repeated; the task that repeats them used to die."""
    monkeypatch.setattr(admission_module, "UNWRITTEN", 2)
    reservations = [await remote.reserve(1000) for _ in range(6)]
    proxy.go_down()
    for reservation in reservations[:2]:
        await remote.settle(reservation, 10)
    proxy.hold_requests, proxy.down = EVALSHA, False
    await wait_until(lambda: proxy.held)
    for reservation in reservations[2:]:
        remote.admission._settle_later(Unwritten(reservation, 10))
    proxy.go_down()
    proxy.let_go()
    proxy.down = False
    await wait_until(lambda: not remote.admission._unwritten)
    assert (await books.spend())[0] >= 20
    for reservation in reservations:
        await remote.settle(reservation, reservation.bound)


async def test_what_waits_is_bounded(proxy: Proxy, remote: Desk, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest beyond the bound are not lost: they stay reserved until their lease is over."""
    monkeypatch.setattr(admission_module, "UNWRITTEN", 3)
    reservations = [await remote.reserve(1000) for _ in range(5)]
    proxy.go_down()
    for reservation in reservations:
        await remote.settle(reservation, 10)
        assert len(remote.admission._unwritten) <= 3
    proxy.down = False
    await wait_until(lambda: not remote.admission._unwritten)
    assert await books.spend() == (30, 2000)
    assert set(await books.open()) == {r.id for r in reservations[:2]}
    for reservation in reservations[:2]:
        await remote.settle(reservation, reservation.bound)
    assert await books.spend() == (2030, 0)


@pytest.mark.parametrize("stuck", [1, 30])
async def test_a_partition_that_refuses_does_not_hold_up_the_others(
    proxy: Proxy, remote: Desk, books: Books, stuck: int
) -> None:
    """As when one node of a cluster is down: what can be written is written."""
    assert tag("acc_one") != tag("acc_other")
    waiting = [await remote.reserve(1000) for _ in range(stuck)]
    fine = await remote.reserve(1000, app="blog", account="acc_other")
    proxy.go_down()
    for reservation in waiting:
        await remote.settle(reservation, 10)
    await remote.settle(fine, 20)
    key = f"{tag('acc_one')}:reservations"
    await books.client.rename(key, "aside")
    await books.client.set(key, "not a hash", ex=60)
    proxy.down = False
    try:
        await wait_until(lambda: books.closed("acc_other"), timeout=3)
        assert await books.spend("acc_other") == (20, 0)
    finally:
        await books.client.rename("aside", key)
    await wait_until(books.closed)
    assert await books.spend() == (10 * stuck, 0)


async def test_settling_after_the_monitors_did(here: Desk, books: Books) -> None:
    reservation = await here.reserve(1000)
    assert await scripts.settle(here.store, tag("acc_one"), reservation.id, None) == 1000
    await here.settle(reservation, 5)
    assert await books.spend() == (1000, 0)
    assert not here.admission._unwritten


async def test_forgotten_scripts_are_sent_again(here: Desk, books: Books) -> None:
    for _ in range(2):
        await books.client.script_flush()
        reservations = await asyncio.gather(*[here.reserve(10) for _ in range(20)])
        await books.client.script_flush()
        await asyncio.gather(*[here.settle(each, 1) for each in reservations])
    assert await books.spend() == (40, 0)


@pytest.mark.parametrize("seed", range(2))
async def test_a_bad_network_neither_loses_nor_doubles_money(
    proxy: Proxy, remote: Desk, books: Books, seed: int
) -> None:
    """Connections die at any moment and requests are cancelled; sums agree to the nano-euro in the end."""
    chance = random.Random(seed)
    admitted: set[str] = set()
    ended: dict[str, int] = {}

    async def request(n: int) -> None:
        await asyncio.sleep(chance.random())
        try:
            reservation = await remote.reserve(1000, user=f"u{n}")
        except BackboneUnavailable:
            return
        admitted.add(reservation.id)
        await asyncio.sleep(chance.random() / 2)
        cost = chance.choice([0, n, 1000, 10**15])
        ended[reservation.id] = min(cost, 1000)
        await remote.settle(reservation, cost)

    async def disturb() -> None:
        while True:
            await asyncio.sleep(chance.random() / 20)
            match chance.randrange(4):
                case 0:
                    proxy.cut()
                case 1:
                    proxy.lose_answer = EVALSHA
                case 2:
                    proxy.go_down()
                    await asyncio.sleep(0.05)
                    proxy.down = False

    disturbing = asyncio.create_task(disturb())
    requests = [asyncio.create_task(request(n)) for n in range(150)]
    await asyncio.sleep(0.6)
    for each in requests:
        if chance.random() < 0.3:
            each.cancel()
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    disturbing.cancel()
    await asyncio.gather(disturbing, return_exceptions=True)
    proxy.down, proxy.lose_answer = False, None
    assert all(each is None or isinstance(each, asyncio.CancelledError) for each in outcomes)
    await wait_until(lambda: not remote.admission._unwritten)
    # What was cancelled between its admission and its settlement is still open, and nothing else.
    left = admitted - ended.keys()
    assert set(await books.open()) == left
    assert await books.spend() == (sum(ended.values()), 1000 * len(left))
    for reservation in left:
        await remote.settle(Reservation(reservation, "acc_one", 1000), 0)
    assert await books.closed()


@pytest.mark.asyncio(loop_scope="session")
async def test_a_user_id_that_is_no_text(app: RunningApp) -> None:
    """JSON can spell half a character; it is refused as a token or counted as a user, but never a crash."""
    response = await app.ask("x", token=app.token("\ud800"))
    assert response.status_code in (200, 401)
