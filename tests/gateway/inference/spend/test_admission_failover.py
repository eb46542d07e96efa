"""Money across a failover, in which a replica that lacks the latest writes takes over."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import redis.asyncio

from gateway.errors import NotReplicated, SpendCapReached
from gateway.inference.spend.admission import Admitted, Reservation
from gateway.redis import client as store_module
from tests.gateway.inference.admissions import CAP, EVALSHA, AdmissionProcess, Books, admission_process
from tests.support.polling import wait_until
from tests.support.redis_servers import BINARIES, RedisServer, acknowledges
from tests.support.tcp_proxy import Proxy
from workers.monitors.leases import settle_overdue

on_redis = pytest.mark.parametrize("servers", ["redis"], indirect=True)  # a Valkey replica needs a second to start


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

    @asynccontextmanager
    async def books(self) -> AsyncIterator[Books]:
        async with redis.asyncio.Redis(port=self.replica.port, decode_responses=True) as client:
            yield Books(client)


@pytest.fixture(scope="module", params=BINARIES)
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[RedisServer, RedisServer]]:
    primary, replica = RedisServer(request.param), RedisServer(request.param)
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
async def here(pair: Pair) -> AsyncIterator[AdmissionProcess]:
    async with admission_process(pair.gateway.url) as running:
        yield running


async def test_a_lost_reservation_is_settled_once(pair: Pair, here: AdmissionProcess) -> None:
    kept = await here.reserve(1_000_003)
    await pair.replicated()
    pair.link.go_down()
    lost = await here.reserve(2_000_033)
    pair.fail_over()
    async with pair.books() as books:
        assert await books.spend() == (0, 1_000_003)
        await here.settle(kept, 7)
        for _ in range(3):
            await here.settle(lost, 1_234_567)
        await wait_until(lambda: not here.admission.pending)
        assert await books.spend() == (1_234_574, 0)
        assert await books.closed()
    assert here.counted("gateway_reservations_lost_total") == 1


@on_redis
async def test_a_lost_answer_after_a_failover_counts_once(pair: Pair, here: AdmissionProcess) -> None:
    await pair.replicated()
    pair.link.go_down()
    lost = await here.reserve(2_000_033)
    pair.fail_over()
    pair.gateway.lose_answer = EVALSHA
    await here.settle(lost, 1_234_567)
    await wait_until(lambda: here.retries() >= 1 and not here.admission.pending)
    async with pair.books() as books:
        assert await books.spend() == (1_234_567, 0)


@on_redis
async def test_a_lost_settlement_is_written_again(pair: Pair, here: AdmissionProcess) -> None:
    """The failover loses the settlement with its answer, but keeps the reservation."""
    reservation = await here.reserve(2_000_033)
    await pair.replicated()
    pair.link.go_down()
    pair.gateway.lose_answer = EVALSHA
    await here.settle(reservation, 1_234_567)
    pair.fail_over()  # before it is repeated
    async with pair.books() as books:
        await wait_until(books.closed)
        await wait_until(lambda: not here.admission.pending)
        assert await books.spend() == (1_234_567, 0)


@on_redis
async def test_a_settlement_lost_after_its_answer_costs_the_maximum(pair: Pair, here: AdmissionProcess) -> None:
    """The gateway has forgotten it, so the monitors worker settles the reservation when its lease has expired."""
    here.admission._lease = 50
    reservation = await here.reserve(2_000_033)
    await pair.replicated()
    pair.link.go_down()
    await here.settle(reservation, 1_234_567)
    pair.fail_over()
    async with pair.books() as books:
        await wait_until(lambda: settle_overdue(here.store))
        await settle_overdue(here.store)
        await here.settle(reservation, 1_234_567)
        assert await books.spend() == (2_000_033, 0)


@on_redis
async def test_a_release_of_an_admission_that_was_not_answered_books_nothing(
    pair: Pair, here: AdmissionProcess
) -> None:
    await here.settle(Reservation("never-answered", "acc_one", 1000), 0)
    with pair.primary.client() as client:
        assert not client.keys("*")
    assert here.counted("gateway_reservations_lost_total") == 0


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
    async with pair.books() as books:
        assert set(await books.open()) == {reservation.id for reservation in reservations}
        assert await books.spend() == (0, 30_000)


@on_redis
@pytest.mark.parametrize("fault", ["away", "frozen", "behind"])
async def test_a_reservation_that_no_replica_has_is_refused_and_released(
    pair: Pair, careful: AdmissionProcess, fault: str
) -> None:
    running = await careful.reserve(500)
    match fault:
        case "away":
            pair.replica.kill()
        case "frozen":
            pair.replica.freeze()
        case "behind":
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
    async with redis.asyncio.Redis(port=pair.primary.port, decode_responses=True) as client:
        books = Books(client)
        await wait_until(books.closed)
        assert await books.spend() == (7, 0)
    if fault == "frozen":
        pair.replica.thaw()
        await wait_until(lambda: _passes(careful))


async def _passes(process: AdmissionProcess) -> bool:
    try:
        await process.settle(await process.reserve(1), 0)
    except NotReplicated:
        return False
    return True


@on_redis
async def test_without_a_replica_a_full_cap_is_still_the_reason_of_a_refusal(
    pair: Pair, careful: AdmissionProcess
) -> None:
    pair.replica.kill()
    with pytest.raises(SpendCapReached):
        await careful.admit(CAP + 1)


@on_redis
async def test_missing_scripts_are_sent_again(pair: Pair, careful: AdmissionProcess) -> None:
    await careful.settle(await careful.reserve(1), 0)
    with pair.primary.client() as client:
        client.script_flush()
    await careful.settle(await careful.reserve(1), 0)


@on_redis
async def test_without_the_setting_no_command_waits_for_replicas(pair: Pair, here: AdmissionProcess) -> None:
    """No extra command is sent, whatever the replica does."""
    pair.replica.freeze()
    with pair.primary.client() as client:
        client.config_resetstat()
        await here.settle(await here.reserve(1), 0)
        calls = client.info("commandstats")
    assert "cmdstat_wait" not in calls
    assert calls["cmdstat_evalsha"]["calls"] + calls.get("cmdstat_eval", {"calls": 0})["calls"] <= 4
    pair.replica.thaw()
