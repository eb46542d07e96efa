"""Many accounts, events and workers at once, also on a cluster."""

import time
from pathlib import Path

import pytest

from gateway.keys import bodies_key, partition_tag, stream_key
from tests.fakes.receiver import FakeReceiver, verified
from tests.support.polling import wait_until
from tests.support.processes import limit_descriptors
from tests.support.redis_servers import cluster
from tests.support.worker_process import Account, Queue
from workers.webhooks import sender

pytestmark = pytest.mark.asyncio(loop_scope="session")
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
