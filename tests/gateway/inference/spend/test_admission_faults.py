"""Faults of Redis, the network and the caller, and failovers: money moves once, and none stays reserved."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.errors import BackboneUnavailable, NotReplicated
from gateway.inference.spend.admission import Admitted, PendingSettlement, RedisClock
from gateway.keys import partition_tag
from gateway.redis import client as store_module
from tests.gateway.inference.admissions import EVALSHA, AdmissionProcess, Books, admission_process
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, acknowledges
from tests.support.tcp_proxy import Proxy


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


@pytest.mark.parametrize("admission_options", [{"max_pending": 2}], ids=["2"])
async def test_an_overflow_during_a_repetition_does_not_stop_the_queue(
    proxy: Proxy, remote: AdmissionProcess, books: Books
) -> None:
    """The overflow removes the settlement that is being repeated."""
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


# -- a failover, in which a replica that lacks the latest writes takes over ---------------------------------------


class Pair:
    """A primary and its replica. A test may disturb the network between them, and the gateway's network to them."""

    def __init__(self, primary: RedisServer, replica: RedisServer, link: Proxy, gateway: Proxy) -> None:
        self.primary, self.replica, self.link, self.gateway = primary, replica, link, gateway

    async def replicated(self) -> None:
        """Waits until the replica has what the primary has."""
        with self.primary.client() as primary, self.replica.client() as replica:
            written = primary.info("replication")["master_repl_offset"]
            await wait_until(lambda: replica.info("replication").get("slave_repl_offset", -1) >= written)

    def fail_over(self) -> None:
        self.primary.kill()
        with self.replica.client() as replica:
            replica.replicaof("NO", "ONE")
        self.gateway.target = self.replica.port
        self.gateway.cut()


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RedisServer, RedisServer]]:
    primary, replica = RedisServer("redis"), RedisServer("redis")  # a Valkey replica needs a second to start
    yield primary, replica
    primary.stop()
    replica.stop()


@pytest.fixture
async def pair(servers: tuple[RedisServer, RedisServer]) -> AsyncIterator[Pair]:
    primary, replica = servers
    for server in servers:
        server.kill()
        server.start()
    async with Proxy(primary.port) as link, Proxy(primary.port) as gateway:
        with primary.client() as client:
            client.config_set("repl-diskless-sync-delay", 0)
        with replica.client() as client:
            client.replicaof("127.0.0.1", str(link.port))
        pair = Pair(primary, replica, link, gateway)
        await wait_until(lambda: asyncio.to_thread(acknowledges, primary))
        yield pair


@pytest.fixture
async def paired(pair: Pair) -> AsyncIterator[AdmissionProcess]:
    async with admission_process(pair.gateway.url) as running:
        yield running


async def test_a_lost_reservation_is_settled_once(pair: Pair, paired: AdmissionProcess) -> None:
    kept = await paired.reserve(1_000_003)
    await pair.replicated()
    pair.link.go_down()
    lost = await paired.reserve(2_000_033)
    pair.fail_over()
    books = Books(paired.store.client)
    assert await books.spend() == (0, 1_000_003)
    await paired.settle(kept, 7)
    for _ in range(3):
        await paired.settle(lost, 1_234_567)
    await wait_until(lambda: not paired.admission.pending)
    assert await books.spend() == (1_234_574, 0)
    assert await books.closed()
    assert paired.counted("gateway_reservations_lost_total") == 1


# -- GATEWAY_REDIS_WAIT --------------------------------------------------------------------------------------


@pytest.fixture
async def careful(pair: Pair) -> AsyncIterator[AdmissionProcess]:
    """A gateway that waits for one replica."""
    async with admission_process(pair.gateway.url, replicas=1) as running:
        yield running


async def test_a_reservation_that_a_replica_has_survives(pair: Pair, careful: AdmissionProcess) -> None:
    reservations = await asyncio.gather(*[careful.reserve(1000, user=f"u{n}") for n in range(30)])
    pair.link.go_down()
    pair.fail_over()
    books = Books(careful.store.client)
    assert set(await books.open()) == {reservation.id for reservation in reservations}
    assert await books.spend() == (0, 30_000)


@pytest.mark.parametrize("fault", ["away", "behind"])
async def test_a_reservation_that_no_replica_has_is_refused_and_released(
    pair: Pair, careful: AdmissionProcess, fault: str
) -> None:
    running = await careful.reserve(500)
    if fault == "away":
        pair.replica.kill()
    else:
        pair.link.swallowing = True
    began = asyncio.get_running_loop().time()
    answers = await asyncio.gather(
        *[careful.admit(1000, user=f"u{n}") for n in range(20)], careful.admit(0), return_exceptions=True
    )
    assert asyncio.get_running_loop().time() - began < store_module.COMMAND_SECONDS
    assert all(isinstance(answer, NotReplicated) for answer in answers[:-1])
    assert (answers[0].status, answers[0].code) == (503, "BACKBONE_UNAVAILABLE")
    assert isinstance(answers[-1], Admitted)  # it reserves nothing
    await careful.settle(running, 7)  # does not wait
    books = Books(careful.store.client)
    await wait_until(books.closed)
    assert await books.spend() == (7, 0)


async def test_without_the_setting_no_command_waits_for_replicas(process: AdmissionProcess, books: Books) -> None:
    await books.client.config_resetstat()
    await process.settle(await process.reserve(1), 0)
    calls = await books.client.info("commandstats")
    assert "cmdstat_wait" not in calls
    assert calls["cmdstat_evalsha"]["calls"] + calls.get("cmdstat_eval", {"calls": 0})["calls"] <= 4
