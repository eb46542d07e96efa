"""Workers and Redis are killed at every step. No event is lost, and only deliveries under way are repeated.

The documented second attempt belongs to an event whose worker died before Redis had its outcome.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.receiver import OK, FakeReceiver, verified
from tests.support.polling import wait_until
from tests.support.processes import limit_descriptors
from tests.support.redis_servers import cluster
from tests.support.tcp_proxy import Proxy
from tests.support.worker_process import Account, Queue, queue
from workers.webhooks import sender

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def proxy(own: Queue) -> AsyncIterator[Proxy]:
    """A proxy between the first worker and Redis."""
    async with Proxy(own.redis.port) as proxy:
        yield proxy


async def next_worker(own: Queue) -> None:
    """Starts a worker that takes over the name of a killed worker, as after the end of its heartbeat."""
    async for key in own.store.client.scan_iter("worker:*"):
        await own.store.client.delete(key)
    await own.worker()


async def assert_each_has_one_outcome(own: Queue, account: Account, ids: list[str]) -> None:
    for worker in own.workers:
        assert await worker.stop() in (0, None)  # its last attempts have ended then
    rows = await account.log()
    assert sorted(row["id"] for row in rows) == sorted(ids)
    assert {row["outcome"] for row in rows} == {"delivered"}
    assert (await own.outcomes())["delivered"] == len(ids)


# A worker is killed


@pytest.mark.parametrize(
    ("step", "times"),
    [("before the post", 1), ("during the post", 2), ("after the answer", 2), ("after the acknowledgement", 1)],
)
async def test_a_worker_killed_at_each_step(
    own: Queue, proxy: Proxy, receiver: FakeReceiver, step: str, times: int
) -> None:
    """The acknowledgement of the dead worker may arrive after another worker has sent the event again."""
    account = await own.account(receiver)
    path = f"/{account.id}"
    worker = await own.worker(url=proxy.url)
    first = await account.emit()
    await account.outcome(first)  # from now on Redis knows the scripts
    if step == "before the post":
        proxy.hold_requests = b":webhook:"  # the claim, which reads the receiver
    elif step == "during the post":
        receiver.hangs(path)
    elif step == "after the answer":
        proxy.hold_requests = b"delivered"
    else:
        proxy.hold_answers = b"delivered"
    event_id = await account.emit()
    await wait_until(lambda: len(receiver.got(path)) == 2 if step == "during the post" else proxy.held)
    worker.kill()
    receiver.plays(path)
    logged = [row["id"] for row in await account.log()]
    assert logged == ([event_id, first] if step == "after the acknowledgement" else [first])
    await next_worker(own)
    assert await account.outcome(event_id) == ("delivered", 204)
    last, calls = await account.emit(), await _scripts_run(own)
    proxy.let_go()
    assert await account.outcome(last) == ("delivered", 204)
    await wait_until(lambda: _scripts_run(own), holds=lambda found: found > calls)
    assert receiver.ids(path) == {first: 1, event_id: times, last: 1}
    await assert_each_has_one_outcome(own, account, [first, event_id, last])


async def _scripts_run(own: Queue) -> int:
    stats = await own.store.client.info("commandstats")
    return sum(stat["calls"] for name, stat in stats.items() if name.startswith("cmdstat_xack"))


# Redis is killed or unreachable


async def test_redis_is_killed(tmp_path: Path, receiver: FakeReceiver) -> None:
    """The worker survives, and records the outcomes when Redis is back."""
    async with queue(tmp_path, durable=True) as durable:
        account = await durable.account(receiver)
        path = f"/{account.id}"
        receiver.plays(path, 0.005, OK)
        ids = await account.emit_many(400)
        worker = await durable.worker()
        for number in (50, 200):
            await wait_until(lambda number=number: len(receiver.got(path)) > number)
            durable.redis.kill()
            await wait_until(lambda: "delivery.waiting" in worker.log)
            durable.redis.start()
            await durable.store.client.connection_pool.disconnect()  # the test's own connections died as well
        await durable.drained(20)
        assert receiver.ids(path) == dict.fromkeys(ids, 1)
        await assert_each_has_one_outcome(durable, account, ids)


@pytest.mark.parametrize("step", [b":webhook:", b"delivered"], ids=["claim", "record"])
async def test_a_reply_of_redis_is_lost(own: Queue, proxy: Proxy, receiver: FakeReceiver, step: bytes) -> None:
    """The script has run, and runs once more."""
    account = await own.account(receiver)
    await own.worker(url=proxy.url)
    ids = [await account.emit()]
    await account.outcome(ids[0])
    proxy.lose_answer = step
    ids.append(await account.emit())
    await wait_until(lambda: proxy.lose_answer is None)
    await own.drained()
    assert receiver.ids(f"/{account.id}") == dict.fromkeys(ids, 1)
    await assert_each_has_one_outcome(own, account, ids)


async def test_sigterm_while_redis_is_unreachable(own: Queue, proxy: Proxy, receiver: FakeReceiver) -> None:
    """The worker ends, and the next one sends the events without an outcome."""
    account = await own.account(receiver)
    worker = await own.worker(url=proxy.url)
    await account.outcome(await account.emit())
    proxy.go_down()
    event_id = await account.emit()
    assert await worker.stop() == 0
    await next_worker(own)
    assert await account.outcome(event_id) == ("delivered", 204)


# Many accounts, events and workers


async def test_hundreds_of_hanging_receivers_do_not_delay_others(own: Queue, receiver: FakeReceiver) -> None:
    """The connections exceed the soft limit of open files, which the worker raises."""
    hanging = [await own.account(receiver) for _ in range(400)]
    for account in hanging:
        receiver.hangs(f"/{account.id}")
        await account.emit()
    healthy = await own.account(receiver)
    await own.worker(prefix=limit_descriptors("-Sn 256"))
    await wait_until(lambda: sum(bool(receiver.got(f"/{account.id}")) for account in hanging) > 300, 30)
    assert await healthy.outcome(await healthy.emit(), sender.BUDGET_SECONDS) == ("delivered", 204)
    await own.drained(30)
    assert await own.outcomes() == {"delivered": 1, "failed": 400, "failed:timeout": 400}, "each had a socket"


async def test_deliveries_on_a_cluster(tmp_path: Path, receiver: FakeReceiver) -> None:
    with cluster() as url:
        own = Queue(url, tmp_path)
        try:
            accounts = [await own.account(receiver) for _ in range(20)]
            nobody = own.unset_account()
            one = await own.worker()
            sent = {account.id: await account.emit_many(10) for account in accounts}
            dropped = await nobody.emit()
            two = await own.worker()
            for account in accounts:
                for event_id in sent[account.id]:
                    assert await account.outcome(event_id, 20) == ("delivered", 204)
                assert receiver.ids(f"/{account.id}") == dict.fromkeys(sent[account.id], 1)
                verified(receiver.got(f"/{account.id}")[0], account.secret)
            assert await nobody.outcome(dropped) == ("dropped", "no-receiver")
            await own.webhooks.redeliver(accounts[0].id, sent[accounts[0].id][0])
            await wait_until(lambda: len(receiver.got(f"/{accounts[0].id}")) == 11)
            assert [await one.stop(), await two.stop()] == [0, 0]
            for worker in own.workers:
                worker.assert_log_is_clean()
        finally:
            await own.close()
