"""The worker runs all monitors, and a broken record stops none of them."""

import asyncio
import secrets
from contextlib import AsyncExitStack
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


@pytest.mark.asyncio(loop_scope="session")
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


# -- reservations of dead gateways -------------------------------------------------------------------------------

ids = map("r{}".format, count())
ACCOUNTS = {partition_tag(f"acc_{n}"): f"acc_{n}" for n in range(300)}  # by partition


async def settle_overdue(store: Store) -> int:
    return await run.settle_overdue(store, run.BATCH_RESERVATIONS)


async def reserve(store: Store, account: str, max_cost: int, life: int = -1) -> str:
    """Reserves as a gateway does. `life` is in ms; a negative one has already expired."""
    limits, reservation = Limits(10**6, 10**6, 10**9), next(ids)
    given = {"reservation": reservation, "life": life, "deadline": 0}
    decision = await scripts.admit(store, account, "a", "u", limits, max_cost, **given)
    assert decision.verdict == "ok"
    return reservation


async def spend(store: Store, account: str) -> tuple[int, int]:
    """Returns the amounts settled and reserved today, in nano-euro."""
    settled, reserved = await store.client.hmget(spend_key(account, await store.today()), ["settled", "reserved"])
    return int(settled or 0), int(reserved or 0)


async def test_only_overdue_reservations_are_settled_at_their_maximum_cost(store: Store) -> None:
    await reserve(store, "acc_1", 100)
    running = await reserve(store, "acc_1", 30, life=60_000)
    for overdue in (1, 0):
        assert await settle_overdue(store) == overdue
        assert await spend(store, "acc_1") == (100, 30)
    admission = Admission(Settings(), store, Metrics())
    await admission.settle(Reservation(running, "acc_1", 30, TARIFFS[0]), 0)
    assert await spend(store, "acc_1") == (100, 0)


async def test_every_partition_is_searched(store: Store) -> None:
    for partition in PARTITION_TAGS:
        await reserve(store, ACCOUNTS[partition], 7)
    assert await settle_overdue(store) == 16
    assert {await spend(store, ACCOUNTS[partition]) for partition in PARTITION_TAGS} == {(7, 0)}
    assert not await store.client.keys("*:leases")


async def test_several_workers_and_a_gateway_settle_each_reservation_once(redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(opened(redis_url)) for _ in range(3)]
        store = stores[0]
        for n in range(100):
            await reserve(store, "acc_1", n + 1)
        assert sum(await asyncio.gather(*map(settle_overdue, stores))) == 100
        assert await spend(store, "acc_1") == (sum(range(1, 101)), 0)
        admission = Admission(Settings(), stores[1], Metrics())
        for _ in range(20):
            before, _ = await spend(store, "acc_1")
            late = Reservation(await reserve(store, "acc_1", 100), "acc_1", 100, TARIFFS[0])
            # Only one of the two settlements counts, and none that comes later.
            await asyncio.gather(settle_overdue(store), admission.settle(late, 5))
            await admission.settle(late, 100)
            after, reserved = await spend(store, "acc_1")
            assert (after - before, reserved) in {(100, 0), (5, 0)}


async def test_a_failing_partition_does_not_delay_the_others(store: Store) -> None:
    """A partition fails, for example, while its node of a cluster is down."""
    first, last = ACCOUNTS["{p09}"], ACCOUNTS["{p96}"]
    for account in (first, last):
        await reserve(store, account, 7)
    await store.client.rename("{p09}:leases", "aside")
    await store.client.set("{p09}:leases", "no set", ex=60)
    try:
        await asyncio.gather(settle_overdue(store), return_exceptions=True)
        assert await spend(store, last) == (7, 0)
    finally:
        await store.client.rename("aside", "{p09}:leases")
        await settle_overdue(store)
    assert await spend(store, first) == (7, 0)


async def test_a_broken_reservation_does_not_delay_the_others(store: Store) -> None:
    """It has been overdue for the longest time, so every search finds it first."""
    broken = await reserve(store, "acc_1", 100, life=-5000)
    for _ in range(3):
        await reserve(store, "acc_1", 7)
    reservations = reservation_keys(partition_tag("acc_1"))[0]
    whole = await store.client.hget(reservations, broken)
    await store.client.hset(reservations, broken, "no words of three")
    assert await settle_overdue(store) == 3
    assert (await spend(store, "acc_1"))[0] == 21
    await store.client.hset(reservations, broken, whole)
    assert await settle_overdue(store) == 1
    assert await spend(store, "acc_1") == (121, 0)


async def test_the_monitors_survive_an_outage_of_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SETTLE_SECONDS", 0.05)
    with RedisServer() as server:
        server.kill()
        async with in_background(run_monitors(Settings(redis_url=server.url))) as task:
            await asyncio.sleep(0.2)
            assert not task.done()
            server.start()
            async with opened(server.url) as store:
                for due in (100, 200):
                    await reserve(store, "acc_1", 100, life=1)
                    await wait_until(lambda: spend(store, "acc_1"), holds=lambda found, due=due: found == (due, 0))
            server.kill()
            await asyncio.sleep(0.2)
            assert not task.done()
