"""Consumers of one stream: who has an entry, who gets it next, and what a Redis that goes away costs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from gateway.events import scripts
from gateway.events.records import Ownership
from gateway.redis.client import ATTEMPT, Store
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.tcp_proxy import Proxy
from workers import stream
from workers.stream import Consumer, Entry

pytestmark = pytest.mark.asyncio(loop_scope="session")
TAG = "{p19}"
KEY = f"{TAG}:events"
IDLE = 1.0  # seconds; production has at least 10


@pytest.fixture(autouse=True)
def claims_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CLAIM_INTERVAL", 0.2)


class Reader:
    """A consumer that takes whatever comes, until the test says otherwise."""

    def __init__(self, url: str, idle: float) -> None:
        self.store = Store(url)
        self.taken: list[str] = []
        self.entries: list[Entry] = []
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.consumer = Consumer(self.store, "events", "webhooks", idle, self._take, self._room)
        self._task: asyncio.Task[None] | None = None

    def _take(self, entry: Entry) -> None:
        self.taken.append(entry.fields["n"])
        self.entries.append(entry)

    async def _room(self) -> None:
        await self.has_room.wait()

    async def start(self) -> "Reader":
        self._task = asyncio.create_task(self.consumer.run())
        return self

    async def joined(self) -> "Reader":
        await wait_until(lambda: self.name and self.consumer._name_valid_until)
        return self

    async def vanish(self) -> None:
        """As a process that was killed: it gives nothing back."""
        tasks = [task for task in (self._task,) if task is not None]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await self.store.close()
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results

    async def finish(self) -> None:
        """Everything taken has its outcome."""
        for entry in self.entries:
            await self.store.client.xack(KEY, "webhooks", entry.id)
            await self.store.client.xdel(KEY, entry.id)
            self.consumer.done(entry)
        self.entries.clear()

    @property
    def name(self) -> str:
        return self.consumer.name


class Stream:
    """What a test does to Redis, and the readers it started."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client: Any = Redis.from_url(url, decode_responses=True)
        self.readers: list[Reader] = []
        self._number = 0

    async def reader(self, url: str | None = None, idle: float = IDLE) -> Reader:
        reader = Reader(url or self.url, idle)
        self.readers.append(reader)
        return await reader.start()

    async def add(self, count: int = 1) -> list[str]:
        numbers = [str(self._number + n) for n in range(count)]
        self._number += count
        pipeline = self.client.pipeline(transaction=False)
        for number in numbers:
            pipeline.xadd(KEY, {"n": number})
        await pipeline.execute()
        return numbers

    async def pending(self, name: str | None = None) -> int:
        with contextlib.suppress(ResponseError):
            return len(await self.client.xpending_range(KEY, "webhooks", "-", "+", 10_000, name))
        return 0

    async def dead(self, count: int) -> list[dict[str, str]]:
        """The dead letters, once there are so many."""
        letters = [fields for _, fields in await self.client.xrange(f"{TAG}:dead")]
        return letters if len(letters) == count else []

    async def forget_heartbeat(self, reader: Reader) -> None:
        """As if its time was over."""
        await self.client.delete(f"worker:webhooks:{reader.name}")


@pytest_asyncio.fixture(loop_scope="session")
async def events(redis_url: str) -> AsyncIterator[Stream]:
    made = Stream(redis_url)
    yield made
    for reader in made.readers:
        with contextlib.suppress(AssertionError):
            await reader.vanish()
    await made.client.aclose()


@pytest_asyncio.fixture(loop_scope="session")
async def proxy(events: Stream, valkey: RedisServer) -> AsyncIterator[Proxy]:
    async with Proxy(valkey.port) as proxy:
        yield proxy


def got(reader: Reader, numbers: list[str]) -> Callable[[], bool]:
    return lambda: sorted(reader.taken, key=int) == numbers


# Names


async def test_names_are_the_lowest_that_are_free(events: Stream) -> None:
    one, two = await (await events.reader()).joined(), await (await events.reader()).joined()
    assert (one.name[-2:], two.name[-2:]) == ("-1", "-2")
    await one.consumer.release()
    three, four = await (await events.reader()).joined(), await (await events.reader()).joined()
    assert (three.name[-2:], four.name[-2:]) == ("-1", "-3")


async def test_more_workers_than_names(events: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "NAMES", 2)
    monkeypatch.setattr(stream, "HEARTBEAT", 0.2)
    one = await (await events.reader()).joined()
    two = await events.reader()
    await asyncio.sleep(0.3)
    before = int((await events.client.info("stats"))["total_commands_processed"])
    await asyncio.sleep(0.3)
    assert int((await events.client.info("stats"))["total_commands_processed"]) - before < 1000, "it waits in peace"
    assert not two.consumer._name_valid_until
    await events.add()
    await wait_until(lambda: one.taken)
    await one.vanish()
    await events.forget_heartbeat(one)
    await two.joined()
    await wait_until(lambda: two.taken == one.taken)


async def test_the_next_of_a_name_takes_up_what_is_pending(events: Stream) -> None:
    """At once, long before anybody else might claim it."""
    one = await (await events.reader(idle=60)).joined()
    numbers = await events.add(250)
    await wait_until(got(one, numbers))
    await one.vanish()
    await events.forget_heartbeat(one)
    next_one = await (await events.reader(idle=60)).joined()
    assert next_one.name == one.name
    await wait_until(got(next_one, numbers))
    (more,) = await events.add()
    await wait_until(lambda: next_one.taken[-1] == more)


async def test_a_name_that_another_took_is_lost(events: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stood still for longer than its heartbeat lives: two of one name would send the same."""
    monkeypatch.setattr(stream, "HEARTBEAT", 0.2)
    one = await (await events.reader(idle=60)).joined()
    first = one.name
    await events.add()
    await wait_until(lambda: one.taken)
    await events.client.set(f"worker:webhooks:{first}", "of another")
    await wait_until(lambda: one.name != first and one.consumer._name_valid_until)
    assert await events.client.get(f"worker:webhooks:{first}") == "of another", "who has it keeps it"
    assert await events.pending(first) == 1, "and what is pending for it"
    entry = one.entries[0].id
    ownership = await scripts.claim_delivery(
        one.store, "{p19}", "x", "e", group="webhooks", consumer=one.name, entry=entry
    )
    assert ownership == Ownership(False, "", "", "")
    (number,) = await events.add()
    await wait_until(lambda: number in one.taken, 10)


async def test_a_heartbeat_that_only_expired_is_taken_up_again(events: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT", 0.2)
    one = await (await events.reader()).joined()
    name = one.name
    await events.forget_heartbeat(one)
    await wait_until(lambda: events.client.exists(f"worker:webhooks:{name}"))
    assert one.name == name


async def test_nothing_is_begun_while_the_name_may_be_anothers(
    events: Stream, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT", 0.1)
    monkeypatch.setattr(stream.keys, "HEARTBEAT_SECONDS", 3)
    one = await (await events.reader(proxy.url)).joined()
    await asyncio.wait_for(one.consumer.confirm_name(), 0.1)
    proxy.go_down()
    await asyncio.sleep(3 - ATTEMPT + 0.1)
    waiting = asyncio.create_task(one.consumer.confirm_name())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    proxy.down = False
    await asyncio.wait_for(waiting, 3)


async def test_names_of_the_long_gone_are_forgotten(events: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await (await events.reader()).joined()
    numbers = await events.add()
    await wait_until(got(one, numbers))
    await events.client.xgroup_createconsumer(KEY, "webhooks", "long-gone-1")
    monkeypatch.setattr(stream, "FORGET_AFTER", -1)
    await events.reader()

    async def names() -> bool:
        found = {consumer["name"] for consumer in await events.client.xinfo_consumers(KEY, "webhooks")}
        return "long-gone-1" not in found and one.name in found

    await wait_until(names)
    assert await events.pending(one.name) == 1, "who has something pending is not"


async def test_a_cancellation_that_was_lost_ends_it_before_its_pause(events: Stream) -> None:
    """asyncio loses one that comes in the moment in which a command is sent: a stop took as long as the pause."""
    one, begun = await events.reader(), asyncio.Event()

    async def lose_cancellation() -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    task = asyncio.create_task(one.consumer._repeat(60, lose_cancellation))
    await begun.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()


# Claims


async def test_what_is_in_memory_is_nobody_elses(events: Stream) -> None:
    one = await (await events.reader()).joined()
    numbers = await events.add(120)
    await wait_until(got(one, numbers))
    two = await (await events.reader()).joined()
    await asyncio.sleep(2 * IDLE)
    assert two.taken == []
    assert got(one, numbers)()
    await one.finish()
    assert await events.pending() == 0


async def test_what_the_dead_left_is_claimed_by_one(events: Stream) -> None:
    dead = await (await events.reader()).joined()
    numbers = await events.add(250)
    await wait_until(got(dead, numbers))
    two, three = await (await events.reader()).joined(), await (await events.reader()).joined()
    await dead.vanish()
    await wait_until(lambda: len(two.taken) + len(three.taken) >= 250, 2 * IDLE + 3)
    await asyncio.sleep(IDLE)
    assert sorted(two.taken + three.taken, key=int) == numbers


async def test_the_living_do_not_hide_what_the_dead_left(events: Stream) -> None:
    """One XAUTOCLAIM looks at a thousand entries: those of a receiver that hangs stand in front for hours."""
    living = await (await events.reader()).joined()
    held = await events.add(2500)
    await wait_until(got(living, held))
    living.has_room.clear()
    await events.client.xreadgroup("webhooks", "dead-1", {KEY: ">"}, block=1)
    left = await events.add(5)
    await asyncio.sleep(stream.BLOCK / 1000 + 0.1)  # a read that began before still gets some
    left = [number for number in left if number not in living.taken]
    left += await events.add(5)
    await events.client.xreadgroup("webhooks", "dead-1", {KEY: ">"})
    two = await (await events.reader()).joined()
    await wait_until(lambda: set(left) <= set(two.taken), 2 * IDLE + 3)
    assert not set(two.taken) & set(living.taken)


async def test_what_is_given_back_is_another_s_at_once(events: Stream) -> None:
    one, two = await (await events.reader(idle=3)).joined(), await (await events.reader(idle=3)).joined()
    two.has_room.clear()
    await asyncio.sleep(1.1)  # claims begin a third of the idle time after the start
    numbers = await events.add(1000)
    await wait_until(lambda: len(one.taken) + len(two.taken) == 1000)
    assert len(one.taken) > 800, "the other had room for one read at most"
    await one.vanish()
    one.store = one.consumer._store = Store(events.url)
    await one.consumer.release()
    two.has_room.set()
    await wait_until(lambda: sorted({*two.taken}, key=int) == numbers, 2)
    assert len(two.taken) == 1000
    await one.store.close()


async def test_claims_begin_after_the_living_could_say_what_they_hold(events: Stream) -> None:
    """At the start, and so after each fault: how long Redis was away before is not known."""
    await events.client.xgroup_create(KEY, "webhooks", "0", mkstream=True)
    numbers = await events.add(2)
    ((_, entries),) = await events.client.xreadgroup("webhooks", "other-1", {KEY: ">"})
    for entry_id, _ in entries:
        await events.client.xclaim(KEY, "webhooks", "other-1", 0, [entry_id], idle=60_000)
    one = await (await events.reader(idle=3)).joined()
    await asyncio.sleep(0.7)
    assert one.taken == []
    await events.client.xclaim(KEY, "webhooks", "other-1", 0, [entries[0][0]], idle=0)  # one of them is alive
    await wait_until(lambda: one.taken)
    assert one.taken == numbers[1:]


async def test_an_outage_makes_nobody_claim_what_the_living_hold(events: Stream, proxy: Proxy) -> None:
    """While Redis is away nobody can say what it holds, and all of it grows idle."""
    one, two = await (await events.reader(proxy.url)).joined(), await (await events.reader(proxy.url)).joined()
    numbers = await events.add(50)
    await wait_until(lambda: len(one.taken) + len(two.taken) == 50)
    proxy.go_down()
    await asyncio.sleep(1.5 * IDLE)
    proxy.down = False
    numbers += await events.add(50)
    await wait_until(lambda: len(one.taken) + len(two.taken) >= 100, 10)
    await asyncio.sleep(1.5 * IDLE)
    assert sorted(one.taken + two.taken, key=int) == numbers


# Faults


async def test_a_read_whose_answer_was_lost_is_made_up_for_at_once(events: Stream, proxy: Proxy) -> None:
    one = await (await events.reader(proxy.url, idle=60)).joined()
    (first,) = await events.add()
    await wait_until(lambda: one.taken == [first])
    proxy.lose_answer = b"XREADGROUP"
    numbers = await events.add(3)
    await wait_until(lambda: one.taken == [first, *numbers])
    assert proxy.lose_answer is None


async def test_a_connection_that_died_without_a_word(
    events: Stream, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BLOCK", 500)
    monkeypatch.setattr(stream, "ATTEMPT", 0.5)
    one = await (await events.reader(proxy.url, idle=60)).joined()
    await wait_until(lambda: events.client.exists(KEY))
    proxy.swallowing = True
    numbers = await events.add(3)
    await asyncio.sleep(0.6)
    proxy.swallowing = False  # for connections made from now on; what was swallowed never comes
    await wait_until(got(one, numbers), 5)


async def test_a_redis_that_lost_everything(events: Stream) -> None:
    one = await (await events.reader()).joined()
    (first,) = await events.add()
    await wait_until(lambda: one.taken == [first])
    await events.client.flushall()
    (second,) = await events.add()
    await wait_until(lambda: one.taken == [first, second])


@pytest.mark.parametrize("command", ["min-replicas-to-write"])
async def test_a_redis_that_refuses_to_write(events: Stream, command: str) -> None:
    one = await (await events.reader()).joined()
    await events.client.config_set(command, 1)
    await asyncio.sleep(0.5)
    await events.client.config_set(command, 0)
    numbers = await events.add(3)
    await wait_until(got(one, numbers), stream.BLOCK / 1000 + 5)


async def test_a_redis_that_was_not_there_at_the_start(events: Stream, proxy: Proxy) -> None:
    proxy.down = True
    one = await events.reader(proxy.url)
    numbers = await events.add(3)
    await asyncio.sleep(0.5)
    proxy.down = False
    await wait_until(got(one, numbers))


async def test_nothing_is_read_without_room(events: Stream) -> None:
    numbers = await events.add(300)
    one = Reader(events.url, IDLE)
    events.readers.append(one)
    one.has_room.clear()
    await (await one.start()).joined()
    await asyncio.sleep(0.3)
    assert one.taken == []
    assert await events.pending() == 0
    one.has_room.set()
    await wait_until(got(one, numbers))


async def test_entries_that_are_gone_are_passed_over(events: Stream) -> None:
    """Removed by hand while they were pending."""
    one = await (await events.reader()).joined()
    numbers = await events.add(3)
    await wait_until(got(one, numbers))
    await one.vanish()
    await events.client.xdel(KEY, one.entries[1].id)
    await events.forget_heartbeat(one)
    two = await (await events.reader()).joined()
    await wait_until(lambda: two.taken == [numbers[0], numbers[2]])


# Poison


async def test_an_entry_that_cannot_be_processed_becomes_a_dead_letter(events: Stream) -> None:
    """As it arrives: fields of nobody, bytes that are no text. What comes before and after it is processed."""
    one = await (await events.reader()).joined()
    before = await events.add()
    await events.client.xadd(KEY, {"garbage": "x" * 10_000})
    await events.client.xadd(KEY, {b"\xff\xfe": b"\x80"})
    after = await events.add()
    await wait_until(got(one, before + after))
    letters = await wait_until(lambda: events.dead(2))
    assert [letter["reason"] for letter in letters] == ["KeyError: 'n'"] * 2
    assert letters[0]["stream"] == "events"
    assert len(letters[0]["fields"]) < 1000, "cut"
    assert await events.pending() == 2, "only what the reader still has"
    await one.finish()
    assert await events.client.xlen(KEY) == 0


@pytest.mark.parametrize("same_name", [True, False])
async def test_poison_of_a_dead_worker_ends_no_other(events: Stream, same_name: bool) -> None:
    """What it had read is read again by its successor of the same name, or claimed by another worker."""
    await events.client.xgroup_create(KEY, "webhooks", "0", mkstream=True)
    one = await (await events.reader()).joined()
    name = one.name
    await one.vanish()
    await events.client.xadd(KEY, {"garbage": "1"})
    (number,) = await events.add()
    await events.client.xreadgroup("webhooks", name if same_name else "elsewhere-1", {KEY: ">"})
    if same_name:
        await events.forget_heartbeat(one)
    two = await (await events.reader()).joined()
    await wait_until(got(two, [number]), 10)
    await wait_until(lambda: events.dead(1))
    (next_number,) = await events.add()
    await wait_until(lambda: next_number in two.taken)


async def test_an_entry_whose_processing_keeps_failing(events: Stream) -> None:
    """It is tried three times, then it is a dead letter; once that is done, nothing claims it."""
    one = await (await events.reader()).joined()
    await events.add()
    buried = False
    for attempt in range(stream.ATTEMPTS):
        assert not buried
        await wait_until(lambda attempt=attempt: len(one.entries) == attempt + 1, 15)
        entry = one.entries[-1]
        buried = await one.consumer.fail(entry, ValueError("a fault"))
        one.consumer.done(entry)
    assert buried
    (letter,) = await wait_until(lambda: events.dead(1))
    assert letter["reason"] == "ValueError: a fault"
    assert await events.pending() == await events.client.xlen(KEY) == 0
