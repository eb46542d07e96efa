"""The worker runs all monitors, and a broken record stops none of them."""

import asyncio
import secrets
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from itertools import count

import pytest

from gateway.accounts.domain_names import record_name
from gateway.accounts.records import Domain
from gateway.inference.spend import scripts
from gateway.inference.spend.admission import Admission, Reservation
from gateway.inference.spend.limits import Limits
from gateway.keys import (
    PARTITION_TAGS,
    certificates_key,
    partition_tag,
    reservation_keys,
    spend_key,
    stream_key,
    tagged_deploy_key,
)
from gateway.redis.client import Store
from gateway.settings import Settings
from gateway.settings.prices import TARIFFS
from gateway.telemetry.metrics import Metrics
from tests.support.background import in_background
from tests.support.dns_server import dns_server
from tests.support.monitored_apps import Fleet
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.stores import opened
from workers.monitors import run
from workers.monitors.run import run_monitors

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_broken_deploys_of_an_external_engine(own: Fleet) -> None:
    domain = f"{secrets.token_hex(4)}.example.com"
    app = await own.app(domains=(Domain(domain, verified=True, proven=True),))
    client, tag, due = own.queue.store.client, partition_tag("acc_1"), certificates_key(partition_tag(app.account.id))
    for entry in ({"garbage": "1"}, {"id": "dep_1", "account": "acc_1", "app": "app_1"}):
        await client.xadd(stream_key(tag, "builds"), entry)
    await client.hset(tagged_deploy_key(tag, "dep_1"), mapping={"id": "dep_1", "state": "no such state"})
    await client.expire(tagged_deploy_key(tag, "dep_1"), 600)
    async with dns_server() as resolver:
        worker = await own.worker("monitors", GATEWAY_DEPLOY_ENGINE="external", GATEWAY_DNS=resolver.address)
        worker.tracebacks_allowed = True
        await wait_until(lambda: "deploys.unreadable" in worker.log, 10)
        await app.probed(3)
        await wait_until(lambda: record_name(domain) in resolver.asked, 20)
        await wait_until(lambda: client.zscore(due, app.app.id), 10)  # 0 until its certificate is inspected
        assert worker.code is None
        assert await worker.stop() == 0


ids = map("r{}".format, count())


class Worker:
    def __init__(self, store: Store) -> None:
        self.store = store

    async def settle_overdue(self, at_most: int = run.BATCH_RESERVATIONS) -> int:
        return await run.settle_overdue(self.store, at_most)

    async def reserve(self, account: str, max_cost: int, life: int) -> str:
        """Reserves as a gateway does. `life` is in ms; a negative one has already expired."""
        reservation = next(ids)
        decision = await scripts.admit(
            self.store,
            account,
            "a",
            "u",
            Limits(10**6, 10**6, 10**9),
            max_cost,
            reservation=reservation,
            life=life,
            deadline=0,
        )
        assert decision.verdict == "ok"
        return reservation

    async def spend(self, account: str) -> tuple[int, int]:
        """Returns the amounts settled and reserved today, in nano-euro."""
        seconds, _ = await self.store.client.time()
        day = datetime.fromtimestamp(seconds, UTC).date().isoformat()
        settled, reserved = await self.store.client.hmget(spend_key(account, day), ["settled", "reserved"])
        return int(settled or 0), int(reserved or 0)


@pytest.fixture
def settler(store: Store) -> Worker:
    return Worker(store)


async def test_only_overdue_reservations_are_settled_at_their_maximum_cost(settler: Worker) -> None:
    await settler.reserve("acc_1", 100, life=-1)
    running = await settler.reserve("acc_1", 30, life=60_000)
    assert await settler.settle_overdue() == 1
    assert await settler.spend("acc_1") == (100, 30)
    assert await settler.settle_overdue() == 0
    assert await settler.spend("acc_1") == (100, 30)
    admission = Admission(Settings(), settler.store, Metrics())
    await admission.settle(Reservation(running, "acc_1", 30, TARIFFS[0]), 0)
    assert await settler.spend("acc_1") == (100, 0)


async def test_every_partition_is_searched(settler: Worker) -> None:
    accounts = {partition_tag(f"acc_{n}"): f"acc_{n}" for n in range(300)}
    for partition in PARTITION_TAGS:
        await settler.reserve(accounts[partition], 7, life=-1)
    assert await settler.settle_overdue() == 16
    for account in accounts.values():
        assert await settler.spend(account) in ((7, 0), (0, 0))
    assert not await settler.store.client.keys("*:leases")


async def test_several_workers_and_a_gateway_settle_each_reservation_once(redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        workers = [Worker(await stack.enter_async_context(opened(redis_url))) for _ in range(3)]
        for n in range(100):
            await workers[0].reserve("acc_1", n + 1, life=-1)
        ended = await asyncio.gather(*[each.settle_overdue() for each in workers])
        assert sum(ended) == 100
        assert await workers[0].spend("acc_1") == (sum(range(1, 101)), 0)
        admission = Admission(Settings(), workers[1].store, Metrics())
        for _ in range(20):
            before = (await workers[0].spend("acc_1"))[0]
            late = Reservation(await workers[0].reserve("acc_1", 100, life=-1), "acc_1", 100, TARIFFS[0])
            # Only one of the two settlements counts, and none that comes later.
            await asyncio.gather(workers[0].settle_overdue(), admission.settle(late, 5))
            await admission.settle(late, 100)
            after, reserved = await workers[0].spend("acc_1")
            assert (after - before, reserved) in {(100, 0), (5, 0)}


async def test_a_failing_partition_does_not_delay_the_others(settler: Worker) -> None:
    """A partition fails, for example, while its node of a cluster is down."""
    accounts = {partition_tag(f"acc_{n}"): f"acc_{n}" for n in range(300)}
    first, last = accounts["{p09}"], accounts["{p96}"]
    await settler.reserve(first, 7, life=-1)
    await settler.reserve(last, 7, life=-1)
    client = settler.store.client
    await client.rename("{p09}:leases", "aside")
    await client.set("{p09}:leases", "no set", ex=60)
    try:
        await asyncio.gather(settler.settle_overdue(), return_exceptions=True)
        assert await settler.spend(last) == (7, 0)
    finally:
        await client.rename("aside", "{p09}:leases")
        await settler.settle_overdue()
    assert await settler.spend(first) == (7, 0)


async def test_a_broken_reservation_does_not_delay_the_others(settler: Worker) -> None:
    """It has been overdue for the longest time, so every search finds it first."""
    broken = await settler.reserve("acc_1", 100, life=-5000)
    for _ in range(3):
        await settler.reserve("acc_1", 7, life=-1)
    reservations = reservation_keys(partition_tag("acc_1"))[0]
    whole = await settler.store.client.hget(reservations, broken)
    await settler.store.client.hset(reservations, broken, "no words of three")
    assert await settler.settle_overdue() == 3
    assert (await settler.spend("acc_1"))[0] == 21
    await settler.store.client.hset(reservations, broken, whole)
    assert await settler.settle_overdue() == 1
    assert await settler.spend("acc_1") == (121, 0)


async def test_the_monitors_survive_an_outage_of_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SETTLE_SECONDS", 0.05)
    with RedisServer() as server:
        server.kill()
        async with in_background(run_monitors(Settings(redis_url=server.url))) as task:
            await asyncio.sleep(0.2)
            assert not task.done()
            server.start()
            async with opened(server.url) as store:
                gateway = Worker(store)
                for _ in range(2):
                    await gateway.reserve("acc_1", 100, life=1)
                    await wait_until(lambda: _is_closed(gateway))
                assert await gateway.spend("acc_1") == (200, 0)
            server.kill()
            await asyncio.sleep(0.2)
            assert not task.done()


async def _is_closed(gateway: Worker) -> bool:
    return (await gateway.spend("acc_1"))[1] == 0
