"""Faults of Redis, the network and the caller: money moves once, and none stays reserved."""

import asyncio
import random

import pytest

from gateway.errors import BackboneUnavailable
from gateway.inference.spend import admission as admission_module
from gateway.inference.spend import scripts
from gateway.inference.spend.admission import PendingSettlement, RedisClock, Reservation
from gateway.redis.partitions import partition_tag
from tests.gateway.inference.admissions import EVALSHA, AdmissionProcess, Books
from tests.support.polling import wait_until
from tests.support.tcp_proxy import Proxy


async def test_without_redis_requests_are_refused(proxy: Proxy, remote: AdmissionProcess) -> None:
    proxy.go_down()
    with pytest.raises(BackboneUnavailable) as refused:
        await remote.admit(1000)
    assert (refused.value.status, refused.value.code) == (503, "BACKBONE_UNAVAILABLE")
    assert refused.value.retry_after


async def test_a_redis_that_does_not_answer(remote: AdmissionProcess, proxy: Proxy, books: Books) -> None:
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
async def test_a_lost_admission_holds_no_money(proxy: Proxy, remote: AdmissionProcess, books: Books, lost: str) -> None:
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


@pytest.mark.parametrize("ahead", [0, 800])
async def test_an_admission_that_arrives_late_holds_no_money(
    proxy: Proxy, remote: AdmissionProcess, books: Books, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network delivers the request after its caller was refused and its release was written.

    This process may believe that Redis's clock is `ahead` ms later than it is, and so let the request arrive later.
    """
    at = RedisClock.at
    monkeypatch.setattr(RedisClock, "at", lambda clock, monotonic: at(clock, monotonic) + ahead)
    monkeypatch.setattr(admission_module, "CLOCK_ERROR_SECONDS", 0.2 + ahead / 1000)
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


async def test_a_settlement_waits_for_redis(proxy: Proxy, remote: AdmissionProcess, books: Books) -> None:
    reservations = [await remote.reserve(1000) for _ in range(5)]
    proxy.go_down()
    for n, reservation in enumerate(reservations):
        await remote.settle(reservation, 100 + n)
    assert await books.spend() == (0, 5000)
    proxy.down = False
    await wait_until(books.closed)
    assert await books.spend() == (510, 0)
    await wait_until(lambda: not remote.admission.pending)
    assert remote.retries() >= 5


async def test_a_settlement_with_a_lost_answer_counts_once(
    proxy: Proxy, remote: AdmissionProcess, books: Books
) -> None:
    reservation, other = await remote.reserve(1000), await remote.reserve(500)
    proxy.lose_answer = EVALSHA
    await remote.settle(reservation, 400)
    await wait_until(lambda: remote.retries() >= 1 and not remote.admission.pending)
    assert await books.spend() == (400, 500)
    await remote.settle(other, 0)


@pytest.mark.parametrize("moment", ["at once", "before Redis", "after Redis", "while connecting"])
async def test_canceled_during_settlement(proxy: Proxy, remote: AdmissionProcess, books: Books, moment: str) -> None:
    reservation = await remote.reserve(1000)
    match moment:
        case "before Redis":
            proxy.hold_requests = EVALSHA
        case "after Redis":
            proxy.hold_answers = EVALSHA
        case "while connecting":
            links = {*proxy.links}
            proxy.cut()
            # The connection that watches the server returns soon; the others return with the next call.
            await wait_until(lambda: not proxy.links & links)
    settling = asyncio.create_task(remote.settle(reservation, 400))
    await (wait_until(lambda: proxy.held) if "Redis" in moment else asyncio.sleep(0))
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    proxy.let_go()
    await wait_until(books.closed)
    assert await books.spend() == (400, 0)


async def test_the_first_of_several_settlements_counts(here: AdmissionProcess, books: Books) -> None:
    reservation = await here.reserve(1000)
    await here.settle(reservation, 300)
    await asyncio.gather(*[here.settle(reservation, cost) for cost in (0, 300, 999, 1000)])
    assert await books.spend() == (300, 0)


async def test_one_of_several_concurrent_settlements_counts(here: AdmissionProcess, books: Books) -> None:
    costs = [0, 111, 222, 333, 1000]
    for _ in range(20):
        before = (await books.spend())[0]
        reservation = await here.reserve(1000)
        await asyncio.gather(*[here.settle(reservation, cost) for cost in costs])
        after, reserved = await books.spend()
        assert after - before in costs
        assert reserved == 0


async def test_the_first_settlement_counts_while_redis_is_away(
    proxy: Proxy, remote: AdmissionProcess, books: Books
) -> None:
    reservation = await remote.reserve(1000)
    proxy.go_down()
    await remote.settle(reservation, 300)
    await remote.settle(reservation, 0)
    proxy.down = False
    await wait_until(books.closed)
    assert await books.spend() == (300, 0)


async def test_the_number_of_pending_settlements_is_limited(
    proxy: Proxy, remote: AdmissionProcess, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest ones beyond the limit stay reserved until their lease expires."""
    monkeypatch.setattr(admission_module, "MAX_PENDING", 3)
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


@pytest.mark.parametrize("stuck", [1, 30])
async def test_a_partition_that_refuses_does_not_delay_the_others(
    proxy: Proxy, remote: AdmissionProcess, books: Books, stuck: int
) -> None:
    """This happens while one node of a cluster is down. The settlements of other nodes are written."""
    assert partition_tag("acc_one") != partition_tag("acc_other")
    waiting = [await remote.reserve(1000) for _ in range(stuck)]
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
    assert await books.spend() == (10 * stuck, 0)


async def test_a_settlement_after_that_of_the_monitors_worker(here: AdmissionProcess, books: Books) -> None:
    reservation = await here.reserve(1000)
    assert (await scripts.settle(here.store, partition_tag("acc_one"), reservation.id, None)).nano_euro == 1000
    await here.settle(reservation, 5)
    assert await books.spend() == (1000, 0)
    assert not here.admission.pending


async def test_missing_scripts_are_sent_again(here: AdmissionProcess, books: Books) -> None:
    for _ in range(2):
        await books.client.script_flush()
        reservations = await asyncio.gather(*[here.reserve(10) for _ in range(20)])
        await books.client.script_flush()
        await asyncio.gather(*[here.settle(each, 1) for each in reservations])
    assert await books.spend() == (40, 0)


@pytest.mark.parametrize("seed", range(2))
async def test_a_bad_network_neither_loses_nor_doubles_money(
    proxy: Proxy, remote: AdmissionProcess, books: Books, seed: int
) -> None:
    """Connections break at any moment and requests are canceled. In the end, the sums agree to the nano-euro."""
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
    await wait_until(lambda: not remote.admission.pending)
    # Only requests that were canceled between their admission and their settlement are still open.
    left = admitted - ended.keys()
    assert set(await books.open()) == left
    assert await books.spend() == (sum(ended.values()), 1000 * len(left))
    for reservation in left:
        await remote.settle(Reservation(reservation, "acc_one", 1000), 0)
    assert await books.closed()


async def test_an_overflow_during_a_repetition_does_not_stop_the_queue(
    proxy: Proxy, remote: AdmissionProcess, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overflow removes the settlement that is being repeated."""
    monkeypatch.setattr(admission_module, "MAX_PENDING", 2)
    reservations = [await remote.reserve(1000) for _ in range(6)]
    proxy.go_down()
    for reservation in reservations[:2]:
        await remote.settle(reservation, 10)
    proxy.hold_requests, proxy.down = EVALSHA, False
    await wait_until(lambda: proxy.held)
    for reservation in reservations[2:]:
        remote.admission._settle_later(PendingSettlement(reservation, 10))
    proxy.go_down()
    proxy.let_go()
    proxy.down = False
    await wait_until(lambda: not remote.admission.pending)
    assert (await books.spend())[0] >= 20
    for reservation in reservations:
        await remote.settle(reservation, reservation.max_cost)
