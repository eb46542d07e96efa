"""A Redis that accepts no writes, in whole or in part, is noticed and reported, and no settlement is lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from gateway.errors import BackboneUnavailable
from gateway.inference.spend.admission import Reservation
from gateway.inference.spend.reservations import ReservationRecord
from gateway.keys import partition_tag
from gateway.operations import redis_health
from gateway.operations.redis_health import RedisHealth
from gateway.redis.client import COMMAND_SECONDS, Store
from gateway.redis.scripts import compare_and_set
from gateway.settings.prices import TARIFFS
from gateway.telemetry.metrics import Metrics
from tests.gateway.inference.admissions import Books, admission_process
from tests.support.background import cancel
from tests.support.logs import captured
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.redis_servers import BINARIES, RedisServer, cluster
from tests.support.stores import opened
from workers.monitors.run import settle_overdue

STATES = {
    "OOM": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "READONLY": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "NOREPLICAS": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
}


class Watch:
    def __init__(self, store: Store) -> None:
        self.store, self.metrics = store, Metrics()
        self.health = RedisHealth(store, self.metrics.redis_up.set, self.metrics.clock_skew.set)

    def up(self) -> float | None:
        return self.metrics.registry.get_sample_value("gateway_redis_up")


@asynccontextmanager
async def watched(url: str, replicas: int = 0) -> AsyncIterator[Watch]:
    async with opened(url, replicas=replicas) as store:
        yield Watch(store)


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(getattr(request, "param", "redis")) as server:
        yield server


def run(server: RedisServer, command: str) -> None:
    with server.client() as client:
        client.execute_command(*command.split())


@pytest.mark.parametrize("own", BINARIES, indirect=True)
async def test_each_kind_of_call_while_redis_accepts_no_writes(own: RedisServer) -> None:
    for code, (broken, mended) in STATES.items():
        run(own, "FLUSHALL")
        async with watched(own.url) as watch, admission_process(own.url) as gateway:
            books = Books(gateway.store.client)
            running, overdue = await gateway.reserve(1000), await gateway.reserve(300)
            await books.client.zadd(f"{partition_tag('acc_one')}:leases", {overdue.id: 1})
            assert (await watch.health.check(), watch.up()) == ("", 1)
            run(own, broken)
            with pytest.raises(BackboneUnavailable, match=rf"New requests are refused: .*\({code}\)\.$"):
                await watch.health.check()
            assert watch.up() == 0
            with pytest.raises(BackboneUnavailable):
                await gateway.admit(1000)
            with pytest.raises(BackboneUnavailable):
                await compare_and_set(gateway.store, "app:shop", "{}")
            await gateway.settle(running, 7)
            assert await settle_overdue(gateway.store) == (1 if code == "OOM" else 0)
            if code == "OOM":  # money moves while the memory is full
                assert await books.spend() == (307, 0)
            run(own, mended)
            assert (await watch.health.check(), watch.up()) == ("", 1)
            await settle_overdue(gateway.store)
            await wait_until(books.closed)
            assert await books.spend() == (307, 0)


async def test_a_lost_reservation_is_booked_while_the_memory_is_full(own: RedisServer) -> None:
    async with admission_process(own.url) as gateway:
        books = Books(gateway.store.client)
        day, now = await books.today(), (await books.client.time())[0] * 1000
        run(own, STATES["OOM"][0])
        record = ReservationRecord("acc_one", day, 1000, now + 60_000, "shop")
        for _ in range(2):
            await gateway.settle(Reservation("lost", "acc_one", 1000, TARIFFS[0], record), 7)
        assert not gateway.admission.pending
        assert await books.spend() == (7, 0)


async def test_replicas_that_are_away(own: RedisServer) -> None:
    async with watched(own.url, replicas=1) as watch:
        with pytest.raises(BackboneUnavailable, match="fewer replicas of Redis confirm writes"):
            await watch.health.check()
        assert watch.up() == 0


async def test_a_fault_is_noticed_within_seconds_without_a_request(own: RedisServer) -> None:
    assert redis_health.CHECK_SECONDS + COMMAND_SECONDS < 5
    async with watched(own.url) as watch:
        checking = asyncio.create_task(watch.health.keep_checking())
        await wait_until(lambda: watch.up() == 1)
        own.kill()
        await wait_until(lambda: watch.up() == 0, 5)
        own.start()
        await wait_until(lambda: watch.up() == 1, PATIENCE_SECONDS)
        await cancel(checking)


def full(slots: list[Any]) -> None:
    with redis.Redis(port=slots[2][1]) as client:
        client.config_set("maxmemory", 1)


async def test_a_cluster_that_accepts_some_writes_is_ready() -> None:
    with cluster() as url:
        async with watched(url) as watch:
            assert (await watch.health.check(), watch.up()) == ("", 1)
            first, *others = await watch.store.client.execute_command("CLUSTER", "SLOTS")
            full(first)
            warning = await watch.health.check()
            assert "Requests of some accounts are refused (" in warning
            assert warning.endswith("of 16 partitions): the memory of Redis is full (OOM).")
            assert watch.up() == 0
            for node in others:
                full(node)
            with pytest.raises(BackboneUnavailable, match=r"New requests are refused: .*\(OOM\)"):
                await watch.health.check()


@pytest.mark.parametrize(("skew", "direction"), [(3_600.2, "ahead of"), (-3_600.2, "behind")])
async def test_a_clock_that_is_off(skew: float, direction: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged once, and once more when it is right again."""
    watch, now = Watch(store), time.time
    with captured(redis_health) as lines:
        await watch.health.check_clock()
        assert abs(watch.metrics.registry.get_sample_value("gateway_clock_skew_seconds")) < 5
        monkeypatch.setattr(time, "time", lambda: now() + skew)
        for _ in range(2):
            with pytest.raises(BackboneUnavailable, match=f"is 3600 seconds {direction} Redis's"):
                await watch.health.check_clock()
        assert abs(watch.metrics.registry.get_sample_value("gateway_clock_skew_seconds") - skew) < 5
        monkeypatch.undo()
        await watch.health.check_clock()
    assert [line["event"] for line in lines] == ["clock.off", "clock.right"]
    assert abs(lines[0]["seconds"] - skew) < 5
