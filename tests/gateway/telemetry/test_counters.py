"""Counting in memory, writing now and then: exactly once, or after a fault at most once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from gateway.telemetry import counters as counters_module
from gateway.telemetry.counters import MINUTE_LIFE, PROCESS_LIFE
from gateway.telemetry.keys import requests_key
from tests.fakes import FakeAppBackend
from tests.fakes.provider import ROLE, chunk
from tests.fakes.server import CLOSE
from tests.gateway.conftest import Launch
from tests.gateway.telemetry.desk import Desk, line
from tests.support.prices import bound, cost
from tests.support.redis_servers import RedisServer
from tests.support.tcp_proxy import Proxy

MINUTE = "{ops}:minute:2026-07-02T12:00"
SPEND = "{ops}:spend:2026-07-02"


@pytest_asyncio.fixture
async def desk(redis_url: str) -> AsyncIterator[Desk]:
    desk = Desk(redis_url)
    yield desk
    await desk.store.close()


async def test_what_is_counted_is_written(desk: Desk) -> None:
    desk.count(times=2)
    desk.counters.request("acc", line(code="USER_RATE_LIMITED"))
    desk.counters.request("acc", line(code="CLIENT_GONE", nano_euro=50))
    desk.counters.request("", line(app="", code="APP_NOT_FOUND"))
    assert await desk.counters.flush()
    assert await desk.held(MINUTE) == {
        "requests": "5",
        "code:USER_RATE_LIMITED": "1",
        "code:CLIENT_GONE": "1",
        "code:APP_NOT_FOUND": "1",
        "streams": "2",
        "ttft:150": "2",
        "inputTokens": "14",
        "outputTokens": "6",
        "settled": "250",
    }
    spent = await desk.store.client.zrange(SPEND, 0, -1, withscores=True)
    assert dict(spent) == {"acc": 250.0, "total": 250.0}
    assert MINUTE_LIFE - 5 < await desk.store.client.ttl(MINUTE) <= MINUTE_LIFE


async def test_nothing_is_written_twice_and_the_next_goes_on(desk: Desk) -> None:
    for _ in range(3):
        desk.count()
        await desk.counters.flush()
        await desk.counters.flush()
    assert (await desk.held(MINUTE))["requests"] == "3"


async def test_a_request_counts_in_the_minute_it_ends_in(desk: Desk) -> None:
    desk.count()
    desk.now += 3600
    desk.count(times=2)
    await desk.counters.flush()
    assert (await desk.held(MINUTE))["requests"] == "1"
    assert (await desk.held(MINUTE.replace("T12", "T13")))["requests"] == "2"


@pytest.mark.parametrize(
    ("ms", "field"),
    [(0.0, "ttft:10"), (10.0, "ttft:10"), (10.1, "ttft:20"), (30_000.0, "ttft:30000"), (31_000.0, "ttft:more")],
)
async def test_a_time_is_in_the_first_bucket_it_fits(desk: Desk, ms: float, field: str) -> None:
    desk.counters.request("acc", line(ttft_ms=ms))
    await desk.counters.flush()
    assert field in await desk.held(MINUTE)


async def test_counts_wait_while_redis_is_away(desk: Desk, valkey: RedisServer) -> None:
    async with Proxy(valkey.port) as proxy:
        there = Desk(proxy.url)
        there.count()
        proxy.go_down()
        for _ in range(3):
            assert not await there.counters.flush()
            there.count()
        proxy.down = False
        assert await there.counters.flush()
        assert (await desk.held(MINUTE))["requests"] == "4"
        await there.store.close()


async def test_counts_that_are_refused_wait_with_what_comes_meanwhile(desk: Desk) -> None:
    await desk.store.client.set(MINUTE, "another kind", ex=60)
    desk.count()
    await desk.counters.flush()
    desk.count()
    await desk.counters.flush()
    assert (await desk.store.client.zscore(SPEND, "acc")) == 200  # the other keys are not held up
    await desk.store.client.delete(MINUTE)
    await desk.counters.flush()
    assert (await desk.held(MINUTE))["requests"] == "2"


async def test_a_count_whose_answer_is_lost_is_not_repeated(desk: Desk, valkey: RedisServer) -> None:
    async with Proxy(valkey.port) as proxy:
        there = Desk(proxy.url)
        there.count()
        await there.counters.flush()
        there.count()
        proxy.lose_answer = b"EVALSHA"
        await there.counters.flush()
        await there.counters.flush()
        assert (await desk.held(MINUTE))["requests"] == "2"
        await there.store.close()


async def test_what_has_waited_too_long_is_dropped(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as later:
        there = Desk("redis://127.0.0.1:1/0")
        later.push_async_callback(there.store.close)
        there.count(times=5)
        assert not await there.counters.flush()
        assert len(there.counters._tallies) == 2
        monkeypatch.setattr(counters_module, "PATIENCE", -1.0)
        assert not await there.counters.flush()
        assert there.counters._tallies == {}
        there.count()  # and counting goes on
        assert len(there.counters._tallies) == 2


async def test_flushes_at_the_same_moment_share_the_work(desk: Desk) -> None:
    desk.count(times=10)
    await asyncio.gather(*(desk.counters.flush() for _ in range(5)))
    assert (await desk.held(MINUTE))["requests"] == "10"


async def test_a_process_shows_its_life_until_it_leaves(desk: Desk) -> None:
    await desk.counters.flush()
    [process] = await desk.store.client.smembers("{ops}:processes")
    life = await desk.held(f"{{ops}}:process:{process}")
    assert life["streams"] == "3"
    assert {"startedAt", "seenAt"} < life.keys()
    for key in ("{ops}:processes", f"{{ops}}:process:{process}"):
        assert 0 < await desk.store.client.ttl(key) <= PROCESS_LIFE
    desk.count()
    await desk.counters.leave()
    assert (await desk.held(MINUTE))["requests"] == "1"
    assert await desk.store.client.keys("{ops}:process*") == []


# -- in a running gateway ------------------------------------------------------------------------------------

session = pytest.mark.asyncio(loop_scope="session")


@session
async def test_a_gateway_that_ends_leaves_nothing_uncounted(launch: Launch, backend: FakeAppBackend) -> None:
    async with launch() as gw:
        app = await gw.app(backend)
        cut = gw.provider.plays(ROLE, chunk("a"), CLOSE)
        await app.ask("xx", token=app.token("ana"))
        await app.ask(cut)
        await gw.stop()
        with gw.redis.client() as client:
            [spend] = client.keys("{ops}:spend:*")
            settled = cost(7, 3) + bound(cut)
            assert dict(client.zrange(spend, 0, -1, withscores=True)) == {
                b"total": settled,
                app.account.id.encode(): settled,
            }
            minutes = [client.hgetall(key) for key in client.keys("{ops}:minute:*")]
            assert sum(int(minute[b"requests"]) for minute in minutes) == 2
            assert sum(int(minute.get(b"code:PROVIDER_ERROR", 0)) for minute in minutes) == 1
            assert client.llen(requests_key(app.account.id)) == 2
            assert client.keys("{ops}:process*") == []
