"""Consumers of one stream: their names, their entries, their claims, and faults of Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from gateway.events import scripts
from gateway.keys import HEARTBEAT_SECONDS, WORKER_STARTS_KEY, WORKER_STARTS_SECONDS, worker_key
from gateway.operations.backlog import count_worker_starts
from gateway.redis.client import Store
from tests.support.background import in_background
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy
from workers import heartbeat, stream
from workers.stream import Consumer, Entry

TAG, GROUP = "{p19}", "webhooks"
KEY = f"{TAG}:events"
IDLE = 1.0  # seconds; production has at least 10


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CLAIM_PAUSE_SECONDS": 0.2, "BLOCK_MS": 500, "COMMAND_SECONDS": 0.5}.items():
        monkeypatch.setattr(stream, name, value)


class Reader:
    """A consumer that accepts every entry while it has room."""

    def __init__(self, url: str, idle: float, **limits: Any) -> None:
        self.store = Store(url)
        self.entries: list[Entry] = []
        self.taken: list[str] = []  # the numbers of the entries
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.consumer = Consumer(self.store, "events", GROUP, idle, self._accept, self.has_room.wait, **limits)
        self._task = asyncio.create_task(self.consumer.run())

    def _accept(self, entry: Entry) -> None:
        self.taken.append(entry.fields["n"])  # raises KeyError for an unreadable entry
        self.entries.append(entry)

    @property
    def name(self) -> str:
        return self.consumer.name

    async def join(self) -> None:
        """Waits until the consumer has a name."""
        await asyncio.wait_for(self.consumer.confirm_name(), 10)

    async def stop(self) -> None:
        self._task.cancel()
        (result,) = await asyncio.gather(self._task, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError), result

    async def vanish(self) -> None:
        """Stops without releasing entries, as a killed process does."""
        await self.stop()
        await self.store.close()


class Stream:
    """The stream in Redis, and the readers of a test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client: Any = Redis.from_url(url, decode_responses=True)
        self.readers: list[Reader] = []
        self._number = 0

    async def reader(self, url: str | None = None, idle: float = IDLE, *, joined: bool = True, **limits: Any) -> Reader:
        reader = Reader(url or self.url, idle, **limits)
        self.readers.append(reader)
        if joined:
            await reader.join()
        return reader

    async def add(self, count: int = 1) -> list[str]:
        numbers = [str(self._number + n) for n in range(count)]
        self._number += count
        pipeline = self.client.pipeline(transaction=False)
        for number in numbers:
            pipeline.xadd(KEY, {"n": number})
        await pipeline.execute()
        return numbers

    async def read_as(self, name: str) -> None:
        """Reads as a worker that then dies."""
        await self.client.xreadgroup(GROUP, name, {KEY: ">"}, block=1)

    async def pending(self, name: str) -> int:
        return len(await self.client.xpending_range(KEY, GROUP, "-", "+", 10_000, name))

    async def expire_heartbeat(self, reader: Reader) -> None:
        await self.client.delete(worker_key(GROUP, reader.name))


@pytest_asyncio.fixture
async def events(redis_url: str) -> AsyncIterator[Stream]:
    made = Stream(redis_url)
    yield made
    for reader in made.readers:
        await reader.vanish()
    await made.client.aclose()


@pytest_asyncio.fixture
async def proxy(events: Stream, valkey: RedisServer) -> AsyncIterator[Proxy]:
    async with Proxy(valkey.port) as proxy:
        yield proxy


def got(numbers: list[str], *readers: Reader) -> Callable[[], bool]:
    """Returns whether the readers got each of the entries once."""
    return lambda: sorted((number for reader in readers for number in reader.taken), key=int) == numbers


# Names


async def test_a_worker_gets_the_lowest_free_number(events: Stream) -> None:
    one, two = await events.reader(), await events.reader()
    assert (one.name[-2:], two.name[-2:]) == ("-1", "-2")
    await one.stop()
    await one.consumer.release_entries()
    three, four = await events.reader(), await events.reader()
    assert (three.name[-2:], four.name[-2:]) == ("-1", "-3")
    await wait_until(lambda: events.client.zcard(WORKER_STARTS_KEY), holds=lambda starts: starts == 4)


async def test_the_next_worker_with_a_name_gets_its_pending_entries_at_once(events: Stream) -> None:
    """Except for those that were deleted meanwhile."""
    one = await events.reader(idle=60)
    numbers = await events.add(250)
    await wait_until(got(numbers, one))
    await one.vanish()
    await events.client.xdel(KEY, one.entries[1].id)
    await events.expire_heartbeat(one)
    successor = await events.reader(idle=60)
    assert successor.name == one.name
    await wait_until(got([numbers[0], *numbers[2:]], successor))
    assert not await events.client.exists(f"{TAG}:dead")
    (more,) = await events.add()
    await wait_until(lambda: successor.taken[-1] == more)


async def test_a_worker_whose_name_was_taken_gets_another_name(events: Stream) -> None:
    """The other worker keeps the name and its pending entries, so that no entry is processed twice."""
    one = await events.reader(idle=60, renewal_seconds=0.1)
    first = one.name
    await events.add()
    await wait_until(lambda: one.taken)
    await events.client.set(worker_key(GROUP, first), "another worker's token")
    await wait_until(lambda: one.name != first)
    await one.join()
    assert await events.client.get(worker_key(GROUP, first)) == "another worker's token"
    assert await events.pending(first) == 1
    claim = scripts.claim_delivery(one.store, TAG, "x", "e", group=GROUP, consumer=one.name, entry=one.entries[0].id)
    assert not (await claim).owned
    (number,) = await events.add()
    await wait_until(lambda: number in one.taken, 10)


async def test_no_work_starts_while_another_worker_may_have_the_name(
    events: Stream, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_SECONDS", 2)
    one = await events.reader(proxy.url, renewal_seconds=0.1)
    await asyncio.wait_for(one.consumer.confirm_name(), 0.1)
    proxy.go_down()
    await asyncio.sleep(2 - stream.COMMAND_SECONDS + 0.1)
    confirming = asyncio.create_task(one.consumer.confirm_name())
    await asyncio.sleep(0.2)
    assert not confirming.done()
    proxy.down = False
    await asyncio.wait_for(confirming, 3)


async def test_consumers_that_are_long_gone_are_removed(events: Stream) -> None:
    one = await events.reader()
    await wait_until(got(await events.add(), one))
    await events.client.xgroup_createconsumer(KEY, GROUP, "long-gone-1")
    await events.reader(forget_consumer_ms=-1)

    async def is_removed() -> bool:
        names = {consumer["name"] for consumer in await events.client.xinfo_consumers(KEY, GROUP)}
        return "long-gone-1" not in names and one.name in names

    await wait_until(is_removed)
    assert await events.pending(one.name) == 1, "a consumer with pending entries stays"


# Claims


async def test_each_entry_of_a_dead_worker_is_claimed_once(events: Stream) -> None:
    dead = await events.reader()
    numbers = await events.add(250)
    await wait_until(got(numbers, dead))
    two, three = await events.reader(), await events.reader()
    await dead.vanish()
    await wait_until(lambda: len(two.taken) + len(three.taken) >= 250, 2 * IDLE + 3)
    await asyncio.sleep(IDLE)
    assert got(numbers, two, three)()


async def test_many_entries_of_a_live_worker_do_not_hide_those_of_a_dead_one(events: Stream) -> None:
    """One XAUTOCLAIM scans a thousand entries, and a live worker may hold all of them."""
    idle = 4  # seconds: a third of it suffices to renew all entries
    live = await events.reader(idle=idle)
    await wait_until(got(await events.add(2500), live))
    live.has_room.clear()
    # The reads that had already started end.
    await wait_until(lambda: events.client.info("clients"), holds=lambda clients: clients["blocked_clients"] == 0)
    left = await events.add(5)
    await events.read_as("dead-1")
    two = await events.reader(idle=idle)
    await wait_until(lambda: set(left) <= set(two.taken), 2 * idle + 3)
    assert not set(two.taken) & set(live.taken)


async def test_released_entries_are_claimed_at_once(events: Stream) -> None:
    """Until then, a worker without room reads nothing."""
    one, two = await events.reader(idle=3), await events.reader(idle=3)
    two.has_room.clear()
    await asyncio.sleep(1.1)  # claims start after a third of the idle time
    numbers = await events.add(1000)
    await wait_until(got(numbers, one))
    await one.stop()
    await one.consumer.release_entries()
    two.has_room.set()
    await wait_until(got(numbers, two), 2)


async def test_after_an_outage_no_entry_of_a_live_worker_is_claimed(events: Stream, proxy: Proxy) -> None:
    """During an outage no worker can renew its entries, and all of them become idle."""
    idle = 3  # seconds: as in production, a third of it is longer than the pause before a retry
    one, two = await events.reader(proxy.url, idle), await events.reader(proxy.url, idle)
    numbers = await events.add(50)
    await wait_until(got(numbers, one, two))
    proxy.go_down()
    await asyncio.sleep(1.5 * idle)
    proxy.down = False
    numbers += await events.add(50)
    await wait_until(lambda: len(one.taken) + len(two.taken) >= 100, 10)
    await asyncio.sleep(1.5 * idle)
    assert got(numbers, one, two)()


# Faults


async def test_a_read_whose_reply_was_lost_is_repeated_at_once(events: Stream, proxy: Proxy) -> None:
    one = await events.reader(proxy.url, idle=60)
    numbers = await events.add()
    await wait_until(got(numbers, one))
    proxy.lose_answer = b"XREADGROUP"
    numbers += await events.add(3)
    await wait_until(got(numbers, one))
    assert proxy.lose_answer is None


async def test_a_connection_that_dies_silently_is_replaced(events: Stream, proxy: Proxy) -> None:
    one = await events.reader(proxy.url, idle=60)
    await wait_until(lambda: events.client.exists(KEY))
    proxy.swallowing = True
    numbers = await events.add(3)
    await asyncio.sleep(0.6)
    proxy.swallowing = False  # for new connections; swallowed bytes never arrive
    await wait_until(got(numbers, one), 5)


async def test_a_redis_that_lost_its_data_gets_new_groups(events: Stream) -> None:
    one = await events.reader()
    numbers = await events.add()
    await wait_until(got(numbers, one))
    await events.client.flushall()
    numbers += await events.add()
    await wait_until(got(numbers, one))


async def test_a_worker_that_starts_without_redis_waits_for_it(events: Stream, proxy: Proxy) -> None:
    proxy.down = True
    one = await events.reader(proxy.url, joined=False)
    numbers = await events.add(3)
    await asyncio.sleep(0.5)
    proxy.down = False
    await wait_until(got(numbers, one))


# Dead letters


@pytest.mark.parametrize("same_name", [True, False], ids=["same-name", "claimed"])
async def test_an_unreadable_entry_of_a_dead_worker_stops_no_other_worker(events: Stream, same_name: bool) -> None:
    one = await events.reader()
    await one.vanish()
    await events.client.xadd(KEY, {"garbage": "1"})
    numbers = await events.add()
    await events.read_as(one.name if same_name else "elsewhere-1")
    if same_name:
        await events.expire_heartbeat(one)
    two = await events.reader()
    await wait_until(got(numbers, two), 10)
    await wait_until(lambda: events.client.xlen(f"{TAG}:dead"), holds=lambda letters: letters == 1)
    numbers += await events.add()
    await wait_until(got(numbers, two))


def beating(
    store: Store, renewal_seconds: float = heartbeat.RENEWAL_SECONDS
) -> AbstractAsyncContextManager[asyncio.Task[None]]:
    return in_background(heartbeat.keep_heartbeat(store, "monitors", renewal_seconds))


def key(number: int) -> str:
    return worker_key("monitors", heartbeat.worker_name(number))


async def test_each_worker_of_a_host_has_its_own_number(store: Store) -> None:
    async with beating(store):
        await wait_until(lambda: store.client.exists(key(1)))
        async with beating(store):
            await wait_until(lambda: store.client.exists(key(2)))
        assert await store.client.get(key(1)) != await store.client.get(key(2))
    assert 0 < await store.client.ttl(key(1)) <= HEARTBEAT_SECONDS


async def test_a_heartbeat_is_renewed(store: Store) -> None:
    async with beating(store, 0.05):
        await wait_until(lambda: store.client.exists(key(1)))
        await store.client.expire(key(1), 2)
        await wait_until(lambda: store.client.ttl(key(1)), holds=lambda left: left > 2)
        await store.client.delete(key(1))
        await wait_until(lambda: store.client.exists(key(1)))
        assert not await store.client.exists(key(2))


async def count_starts(store: Store, after: float = 0) -> int:
    seconds, _ = await store.client.time()
    return (await count_worker_starts(store, int((seconds + after) * 1000)))["monitors"]


async def test_a_worker_that_starts_again_and_again_is_noticed(store: Store) -> None:
    """Its former heartbeat may go on for a while, or the next worker may have its name."""
    await store.client.zadd(WORKER_STARTS_KEY, {"monitors:long-ago:x": 1})
    for starts in range(1, 4):
        async with beating(store):
            await wait_until(lambda: count_starts(store), holds=lambda found, expected=starts: found == expected)
        await store.client.delete(key(1))
    assert await count_starts(store, after=WORKER_STARTS_SECONDS + 1) == 0
    assert await store.client.zcard(WORKER_STARTS_KEY) == 3
    assert 0 < await store.client.ttl(WORKER_STARTS_KEY) <= WORKER_STARTS_SECONDS
    await store.client.delete(WORKER_STARTS_KEY)  # four that start once are not one that starts often
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(beating(store))
        await wait_until(lambda: store.client.zcard(WORKER_STARTS_KEY), holds=lambda starts: starts == 4)
        assert await count_starts(store) == 1


async def test_a_heartbeat_begins_soon_after_a_fault_of_redis() -> None:
    with RedisServer("valkey") as server:
        server.kill()
        async with opened(server.url) as store, beating(store, 60) as task:
            await asyncio.sleep(0.2)
            assert not task.done()
            server.start()
            await wait_until(lambda: store.client.exists(key(1)))
