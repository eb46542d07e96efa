"""Many at once: receivers that hang by the hundred, more events than fit in memory, several workers, a cluster."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.redis.partitions import partition_tag
from tests.fakes.receiver import OK, FakeReceiver, verified
from tests.support.polling import wait_until
from tests.support.redis_servers import cluster
from tests.support.worker_process import Account, Queue, queue
from workers.webhooks import sender

pytestmark = pytest.mark.asyncio(loop_scope="session")
WRITE_EVENTS = """
for n = 0, ARGV[3] - 1 do
    local id = ARGV[1] .. '-' .. n
    redis.call('XADD', KEYS[1], '*', 'id', id, 'account', ARGV[1], 'app', 'shop', 'type', 'app.crashed', 'data', '{}',
        'at', ARGV[2])
end
"""
FEW_FILES = ("sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh")


@pytest_asyncio.fixture(loop_scope="session")
async def own(tmp_path: Path) -> AsyncIterator[Queue]:
    async with queue(tmp_path) as running:
        yield running


async def write_events(own: Queue, accounts: list[Account], each: int) -> None:
    """Straight into the streams: faster than a script for each."""
    for account in accounts:
        at = int(time.time() * 1000)
        await own.store.client.eval(WRITE_EVENTS, 1, f"{partition_tag(account.id)}:events", account.id, at, each)


async def delays(account: Account, receiver: FakeReceiver, count: int) -> list[float]:
    """Seconds from an event to its request."""
    path, found = f"/{account.id}", []
    for number in range(count):
        began = time.monotonic()
        await account.emit()
        await wait_until(lambda number=number: len(receiver.got(path)) > number, 20, 0.005)
        found.append(receiver.got(path)[number].at - began)
    return found


async def test_hundreds_that_hang(own: Queue, receiver: FakeReceiver) -> None:
    """More connections than a shell's usual limit of open files lets a process have."""
    hanging = [await own.account(receiver) for _ in range(400)]
    for account in hanging:
        receiver.hangs(f"/{account.id}")
    healthy = await own.account(receiver)
    await write_events(own, hanging, 10)
    await own.worker(wrapper=FEW_FILES)
    await wait_until(lambda: sum(bool(receiver.got(f"/{account.id}")) for account in hanging) > 300, 10)
    assert max(await delays(healthy, receiver, 20)) < sender.BUDGET / 2
    await wait_until(lambda: all(receiver.got(f"/{account.id}") for account in hanging), 10)
    outcomes = await own.outcomes()
    assert outcomes.keys() <= {"delivered", "failed", "failed:timeout"}, "not for want of sockets"


async def test_more_than_memory_holds(own: Queue, receiver: FakeReceiver) -> None:
    """All of it for receivers that hang: those give up what is newest, and nobody else waits or loses."""
    hanging = [await own.account(receiver) for _ in range(12)]
    for account in hanging:
        receiver.hangs(f"/{account.id}")
    healthy = await own.account(receiver)
    each = sender.EVENTS // 10
    await write_events(own, hanging, each)
    worker = await own.worker(constants={"workers.webhooks.sender.BUDGET": 1})

    async def dropped() -> int:
        return (await own.outcomes()).get("dropped:overflow", 0)

    await wait_until(lambda: dropped(), 20)
    assert max(await delays(healthy, receiver, 20)) < 3, "the others wait for minutes"
    assert worker.memory < 250 * 2**20
    await worker.stop()
    outcomes, left = await own.outcomes(), await own.waiting()
    assert left + outcomes["delivered"] + outcomes.get("failed", 0) + outcomes["dropped"] == 12 * each + 20
    assert outcomes["dropped"] == outcomes["dropped:overflow"] < 6 * each
    for account in hanging:
        entries = await own.store.client.xrange(f"{partition_tag(account.id)}:events")
        kept = {fields["id"] for _, fields in entries} | receiver.ids(f"/{account.id}").keys()
        assert {f"{account.id}-{number}" for number in range(each // 8)} <= kept, "the oldest are kept"


async def test_what_a_worker_gives_back_the_next_sends_at_once(own: Queue, receiver: FakeReceiver) -> None:
    """Long before the claim time, by one that was there all along."""
    gate, idle = asyncio.Event(), 7.0
    short = {"gateway.settings.SHORTEST_CLAIM_IDLE": idle}
    receiver.default = [gate, *OK]
    leaving, staying = await asyncio.gather(
        *(own.worker(constants=short, GATEWAY_WEBHOOK_CLAIM_IDLE=str(idle)) for _ in range(2))
    )
    await asyncio.gather(leaving.joined(), staying.joined())
    accounts = [await own.account(receiver) for _ in range(16)]
    await asyncio.sleep(idle / 3)  # a worker claims nothing in its first third of the claim time
    sent = [await account.emit_many(40) for account in accounts]
    await wait_until(lambda: len(receiver.exchanges) >= 16)
    stopping = asyncio.create_task(leaving.stop())
    await asyncio.sleep(0.2)
    gate.set()
    assert await stopping == 0
    began = time.monotonic()

    async def nothing_waits() -> bool:
        return await own.waiting() == 0

    await wait_until(nothing_waits, 10)
    assert time.monotonic() - began < 4
    for account, ids in zip(accounts, sent, strict=True):
        assert receiver.ids(f"/{account.id}") == dict.fromkeys(ids, 1)
    assert await own.outcomes() == {"delivered": 640}
    assert "stream.claimed" in staying.log


async def test_a_redis_that_stands_still(own: Queue, receiver: FakeReceiver) -> None:
    """Longer than a command may take, and than a delivery may be idle: what was sent is written down afterwards."""
    receiver.default = [0.02, *OK]
    idle = 5.0
    short = {"gateway.settings.SHORTEST_CLAIM_IDLE": idle, "workers.webhooks.sender.BUDGET": 3}
    await asyncio.gather(*(own.worker(constants=short, GATEWAY_WEBHOOK_CLAIM_IDLE=str(idle)) for _ in range(2)))
    accounts = [await own.account(receiver) for _ in range(8)]
    sent = await asyncio.gather(*(account.emit_many(100) for account in accounts))
    await wait_until(lambda: len(receiver.exchanges) > 100)
    own.redis.freeze()
    await asyncio.sleep(idle + 0.5)
    own.redis.thaw()
    await own.store.client.connection_pool.disconnect()

    async def nothing_waits() -> bool:
        return await own.waiting() == 0

    await wait_until(nothing_waits, 30)
    for account, ids in zip(accounts, sent, strict=True):
        assert receiver.ids(f"/{account.id}") == dict.fromkeys(ids, 1)
    assert await own.outcomes() == {"delivered": 800}


async def test_memory_is_flat(own: Queue, receiver: FakeReceiver) -> None:
    worker = await own.worker()
    accounts = [await own.account(receiver) for _ in range(64)]

    async def round_trip() -> int:
        await write_events(own, accounts, 20)
        await wait_until(nothing_waits, 20)
        return worker.memory

    async def nothing_waits() -> bool:
        return await own.waiting() == 0

    for _ in range(2):
        await round_trip()
    before = worker.memory
    for _ in range(4):
        await round_trip()
    assert worker.memory - before < 4 * 2**20


async def test_on_a_cluster(tmp_path: Path, receiver: FakeReceiver) -> None:
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
