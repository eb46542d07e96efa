"""Workers and Redis are killed at every step. No event is lost, and only deliveries under way are repeated.

The documented second attempt belongs to an event whose worker died before Redis had its outcome.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.keys import bodies_key, partition_tag, stream_key
from tests.fakes.receiver import OK, FakeReceiver, verified
from tests.support.polling import wait_until
from tests.support.processes import limit_descriptors
from tests.support.redis_servers import cluster
from tests.support.tcp_proxy import Proxy
from tests.support.worker_process import Account, Queue, queue
from workers.webhooks import sender

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def durable(tmp_path: Path) -> AsyncIterator[Queue]:
    """A queue on a Redis server that persists its data."""
    async with queue(tmp_path, durable=True) as running:
        yield running


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


async def restart_redis(durable: Queue) -> None:
    durable.redis.start()
    await durable.store.client.connection_pool.disconnect()  # the test's own connections died as well


async def assert_each_has_one_outcome(own: Queue, account: Account, ids: list[str], outcome: str = "delivered") -> None:
    for worker in own.workers:
        assert await worker.stop() in (0, None)  # its last attempts have ended then
    rows = await account.log()
    assert sorted(row["id"] for row in rows) == sorted(ids)
    assert {row["outcome"] for row in rows} == {outcome}
    assert (await own.outcomes())[outcome] == len(ids)


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
    await wait_until(lambda: _more_than(own, calls))
    assert receiver.ids(path) == {first: 1, event_id: times, last: 1}
    await assert_each_has_one_outcome(own, account, [first, event_id, last])


async def _scripts_run(own: Queue) -> int:
    stats = await own.store.client.info("commandstats")
    return sum(stat["calls"] for name, stat in stats.items() if name.startswith("cmdstat_xack"))


async def _more_than(own: Queue, calls: int) -> bool:
    return await _scripts_run(own) > calls


async def test_workers_killed_while_many_events_wait(own: Queue, receiver: FakeReceiver) -> None:
    """Events that were not under way are sent once."""
    account = await own.account(receiver)
    path = f"/{account.id}"
    receiver.plays(path, 0.005, OK)
    ids = await account.emit_many(600)
    worker = await own.worker()
    for _ in range(3):
        sent = len(receiver.got(path))
        await wait_until(lambda sent=sent: len(receiver.got(path)) > sent + 30)
        worker.kill()
        await next_worker(own)
        worker = own.workers[-1]
    await own.drained(20)
    times = receiver.ids(path)
    assert times.keys() == set(ids)
    # At most eight deliveries of an account are under way.
    assert sum(times.values()) <= len(ids) + 3 * 8
    await assert_each_has_one_outcome(own, account, ids)


async def test_one_worker_is_killed_and_one_stalls(own: Queue, receiver: FakeReceiver) -> None:
    """A third worker claims the events of both. The stalled worker resumes, and sends none of the claimed events."""
    gate = asyncio.Event()
    receiver.default = [gate, *OK]
    # No delivery times out before the gate opens. The claim time must exceed the budget.
    patient = {"workers.webhooks.sender.BUDGET_SECONDS": 15}
    killed, frozen = [await own.worker(constants=patient, GATEWAY_WEBHOOK_CLAIM_IDLE="30") for _ in range(2)]
    await asyncio.gather(killed.joined(), frozen.joined())
    accounts = [await own.account(receiver) for _ in range(16)]
    tags = {partition_tag(account.id) for account in accounts}
    ids: list[str] = []

    async def both_hold_some() -> bool:
        for account in accounts:
            ids.extend(await account.emit_many(2))
        pending: dict[str, int] = {}
        for tag in tags:
            for consumer in await own.store.client.xinfo_consumers(f"{tag}:events", "webhooks"):
                pending[consumer["name"]] = pending.get(consumer["name"], 0) + consumer["pending"]
        return len(pending) == 2 and min(pending.values()) > 10

    async def all_have_one_under_way() -> bool:
        """Returns whether each worker that has events of an account has sent exactly one of them."""
        holders: list[tuple[str, str]] = []
        for tag in tags:
            entries = dict(await own.store.client.xrange(f"{tag}:events"))
            pending = await own.store.client.xpending_range(f"{tag}:events", "webhooks", "-", "+", 1000)
            holders += [(held["consumer"], entries[held["message_id"]]["account"]) for held in pending]
        return len(holders) == len(ids) and len(receiver.exchanges) == len(set(holders))

    await wait_until(both_hold_some)
    await wait_until(all_have_one_under_way)
    killed.kill()
    with frozen.paused():
        under_way = {exchange.header("x-service-delivery") for exchange in receiver.exchanges}
        gate.set()
        claims_soon = {
            "gateway.settings.parsing.SHORTEST_CLAIM_IDLE_SECONDS": 2.5,
            "workers.webhooks.sender.BUDGET_SECONDS": 1,
        }
        await own.worker(constants=claims_soon, GATEWAY_WEBHOOK_CLAIM_IDLE="2.5")
        await own.drained(20)
    ids += [await account.emit() for account in accounts]
    await own.drained()
    assert await frozen.stop() == 0
    times = receiver.ids("")
    for account in accounts:
        times += receiver.ids(f"/{account.id}")
    assert times == {event_id: 2 if event_id in under_way else 1 for event_id in ids}
    rows = [row for account in accounts for row in await account.log()]
    assert sorted(row["id"] for row in rows) == sorted(ids)


# Redis is killed or unreachable


async def test_redis_is_killed(durable: Queue, receiver: FakeReceiver) -> None:
    """The worker survives, and records the outcomes when Redis is back."""
    account = await durable.account(receiver)
    path = f"/{account.id}"
    receiver.plays(path, 0.005, OK)
    ids = await account.emit_many(400)
    worker = await durable.worker()
    for number in (50, 200):
        await wait_until(lambda number=number: len(receiver.got(path)) > number)
        durable.redis.kill()
        await wait_until(lambda: "delivery.waiting" in worker.log)
        await restart_redis(durable)
    await durable.drained(20)
    assert receiver.ids(path) == dict.fromkeys(ids, 1)
    ids.append(await account.emit())
    assert await account.outcome(ids[-1]) == ("delivered", 204)
    verified(receiver.got(path)[-1], account.secret)
    await assert_each_has_one_outcome(durable, account, ids)


async def test_redis_is_unreachable_after_the_post(own: Queue, proxy: Proxy, receiver: FakeReceiver) -> None:
    account = await own.account(receiver)
    answering = asyncio.Event()
    receiver.plays(f"/{account.id}", answering, OK)
    await own.worker(url=proxy.url)
    event_id = await account.emit()
    await wait_until(lambda: receiver.got(f"/{account.id}"))
    proxy.go_down()
    answering.set()
    await asyncio.sleep(0.5)
    assert await account.log() == []
    proxy.down = False
    assert await account.outcome(event_id) == ("delivered", 204)
    assert receiver.ids(f"/{account.id}") == {event_id: 1}
    await assert_each_has_one_outcome(own, account, [event_id])


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


WRITE_EVENTS = """
for n = 0, ARGV[3] - 1 do
    local id = ARGV[1] .. '-' .. n
    redis.call('XADD', KEYS[1], '*', 'id', id, 'account', ARGV[1], 'app', 'shop', 'type', 'app.crashed', 'at', ARGV[2])
    redis.call('HSET', KEYS[2], id, '{}')
end
redis.call('EXPIRE', KEYS[2], 86400)
"""


async def write_events(own: Queue, accounts: list[Account], each: int) -> None:
    """Writes events straight to the streams, which is faster than one script call per event."""
    for account in accounts:
        keys = stream_key(partition_tag(account.id), "events"), bodies_key(account.id)
        await own.store.client.eval(WRITE_EVENTS, 2, *keys, account.id, int(time.time() * 1000), each)


async def delays(account: Account, receiver: FakeReceiver, count: int) -> list[float]:
    """Returns the seconds from each event to its request."""
    path, found = f"/{account.id}", []
    for number in range(count):
        began = time.monotonic()
        await account.emit()
        await wait_until(lambda number=number: len(receiver.got(path)) > number, 20, 0.005)
        found.append(receiver.got(path)[number].at - began)
    return found


async def test_hundreds_of_hanging_receivers_do_not_delay_others(own: Queue, receiver: FakeReceiver) -> None:
    """The connections exceed the soft limit of open files, which the worker raises."""
    hanging = [await own.account(receiver) for _ in range(400)]
    for account in hanging:
        receiver.hangs(f"/{account.id}")
    healthy = await own.account(receiver)
    await write_events(own, hanging, 10)
    await own.worker(prefix=limit_descriptors("-Sn 256"))
    await wait_until(lambda: sum(bool(receiver.got(f"/{account.id}")) for account in hanging) > 300, 30)
    assert max(await delays(healthy, receiver, 20)) < sender.BUDGET_SECONDS
    await wait_until(lambda: all(receiver.got(f"/{account.id}") for account in hanging), 30)
    outcomes = await own.outcomes()
    assert outcomes.keys() <= {"delivered", "failed", "failed:timeout"}, "no delivery lacked a socket"


async def test_full_memory_drops_the_newest_events_of_hanging_receivers(own: Queue, receiver: FakeReceiver) -> None:
    """Other accounts neither wait nor lose events."""
    hanging = [await own.account(receiver) for _ in range(12)]
    for account in hanging:
        receiver.hangs(f"/{account.id}")
    # Events wait behind the earlier ones of their partition, so the healthy account shares none with the others.
    tags = {partition_tag(account.id) for account in hanging}
    healthy = own.unset_account(lambda tag: tag not in tags)
    await healthy.set(receiver.url(f"/{healthy.id}"))
    each = sender.MAX_EVENTS // 10
    await write_events(own, hanging, each)
    worker = await own.worker(constants={"workers.webhooks.sender.BUDGET_SECONDS": 1})

    async def dropped() -> int:
        return (await own.outcomes()).get("dropped:overflow", 0)

    await wait_until(lambda: dropped(), 20)
    assert max(await delays(healthy, receiver, 20)) < 3, "events of the others wait for minutes"
    assert worker.memory < 250
    await worker.stop()
    outcomes, left = await own.outcomes(), await own.waiting()
    assert left + outcomes["delivered"] + outcomes.get("failed", 0) + outcomes["dropped"] == 12 * each + 20
    assert outcomes["dropped"] == outcomes["dropped:overflow"] < 6 * each
    for account in hanging:
        entries = await own.store.client.xrange(f"{partition_tag(account.id)}:events")
        kept = {fields["id"] for _, fields in entries} | receiver.ids(f"/{account.id}").keys()
        assert {f"{account.id}-{number}" for number in range(each // 8)} <= kept, "the oldest are kept"


async def test_memory_does_not_grow(own: Queue, receiver: FakeReceiver) -> None:
    worker = await own.worker()
    accounts = [await own.account(receiver) for _ in range(64)]

    async def round_trip() -> float:
        await write_events(own, accounts, 20)
        await own.drained(20)
        return worker.memory

    for _ in range(2):
        await round_trip()
    before = worker.memory
    for _ in range(4):
        await round_trip()
    assert worker.memory - before < 4


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
