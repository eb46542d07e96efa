"""Counting in memory, writing now and then: exactly once, or after a fault at most once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
import pytest_asyncio

from gateway.inference.prices import Usage
from gateway.store.client import Store
from gateway.store.keys import tag
from gateway.telemetry import counters as counters_module
from gateway.telemetry.counters import HOUR_LIFE, MINUTE_LIFE, MOST_TOKENS, PROCESS_LIFE, Counters
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk, tokens
from tests.fakes.server import CLOSE
from tests.gateway.conftest import Launch
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.prices import bound, cost
from tests.support.redis_servers import RedisServer
from tests.support.tcp_proxy import Proxy

NOON = datetime(2026, 7, 2, 12, 0, 30, tzinfo=UTC).timestamp()
MINUTE = "{ops}:minute:2026-07-02T12:00"
SPEND = "{ops}:spend:2026-07-02"
USAGE = f"{tag('acc')}:usage:acc:2026-07-02T12"


class Desk:
    """One process's counters, on a clock that stands still until it is set."""

    def __init__(self, url: str) -> None:
        self.store = Store(url)
        self.now = NOON
        self.counters = Counters(self.store, lambda: 3, lambda: self.now)

    def count(self, account: str = "acc", code: str = "", times: int = 1) -> None:
        for _ in range(times):
            self.counters.request(account, code, 0.12, Usage(7, 3), 100)

    async def held(self, key: str) -> dict[str, str]:
        return await self.store.client.hgetall(key)


@pytest_asyncio.fixture
async def desk(redis_url: str) -> AsyncIterator[Desk]:
    desk = Desk(redis_url)
    yield desk
    await desk.store.close()


async def test_what_is_counted_is_written(desk: Desk) -> None:
    desk.count(times=2)
    desk.counters.request("acc", "USER_RATE_LIMITED", None, None, 0)
    desk.counters.request("acc", "CLIENT_GONE", None, None, 50)
    desk.counters.request("", "APP_NOT_FOUND", None, None, 0)
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
    # Who left was not refused.
    assert await desk.held(USAGE) == {"requests": "4", "refused": "1", "inputTokens": "14", "outputTokens": "6"}
    spent = await desk.store.client.zrange(SPEND, 0, -1, withscores=True)
    assert dict(spent) == {"acc": 250.0, "total": 250.0}
    for key, life in ((MINUTE, MINUTE_LIFE), (USAGE, HOUR_LIFE)):
        assert life - 5 < await desk.store.client.ttl(key) <= life


async def test_what_no_counter_can_hold_is_cut(desk: Desk) -> None:
    for _ in range(2):
        desk.counters.request("acc", "", None, Usage(10**30, 5), 0)
    assert await desk.counters.flush()
    expected = {"requests": "2", "inputTokens": str(2 * MOST_TOKENS), "outputTokens": "10"}
    assert await desk.held(USAGE) == expected
    assert 0 < await desk.store.client.ttl(USAGE) <= HOUR_LIFE


async def test_nothing_is_written_twice_and_the_next_goes_on(desk: Desk) -> None:
    for _ in range(3):
        desk.count()
        await desk.counters.flush()
        await desk.counters.flush()
    assert (await desk.held(MINUTE))["requests"] == "3"


async def test_a_request_counts_in_the_minute_and_hour_it_ends_in(desk: Desk) -> None:
    desk.count()
    desk.now += 3600
    desk.count(times=2)
    await desk.counters.flush()
    assert (await desk.held(MINUTE))["requests"] == "1"
    assert (await desk.held(MINUTE.replace("T12", "T13")))["requests"] == "2"
    assert (await desk.held(USAGE.replace("T12", "T13")))["requests"] == "2"


@pytest.mark.parametrize(
    ("seconds", "field"),
    [(0.0, "ttft:10"), (0.01, "ttft:10"), (0.0101, "ttft:20"), (30.0, "ttft:30000"), (31.0, "ttft:more")],
)
async def test_a_time_is_in_the_first_bucket_it_fits(desk: Desk, seconds: float, field: str) -> None:
    desk.counters.request("acc", "", seconds, None, 0)
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
    assert (await desk.held(USAGE))["requests"] == "2"  # the other keys are not held up
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
        assert len(there.counters._tallies) == 3
        monkeypatch.setattr(counters_module, "PATIENCE", -1.0)
        assert not await there.counters.flush()
        assert there.counters._tallies == {}
        there.count()  # and counting goes on
        assert len(there.counters._tallies) == 3


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
async def test_an_account_sees_its_day_by_the_hour(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("Bon", "jour", usage=(70, 30)))
    for _ in range(3):
        await app.ask(prompt)
    await app.ask("x", maxTokens=0)
    await app.post({"prompt": "x"}, headers={})

    async def counted() -> list[dict[str, object]] | None:
        hours = (await app.account.get("/account/usage")).json()
        return hours if sum(hour["requests"] for hour in hours) == 5 else None

    hours = await wait_until(counted)
    assert len(hours) == 24
    times = [datetime.fromisoformat(hour.pop("hour")) for hour in hours]
    assert {after - before for before, after in pairwise(times)} == {timedelta(hours=1)}
    assert timedelta(0) <= datetime.now(UTC) - times[-1] < timedelta(hours=1, minutes=1)
    total = {name: sum(hour[name] for hour in hours[-2:]) for name in hours[-1]}
    assert total == {"requests": 5, "refused": 2, "inputTokens": 210, "outputTokens": 90}


@session
async def test_usage_is_the_accounts_own(gw: Gateway, app: App) -> None:
    await app.ask("x")
    hours = (await (await gw.account()).get("/account/usage")).json()
    assert all(hour["requests"] == 0 for hour in hours)
    assert (await gw.http.get("/account/usage")).status_code == 401


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
            assert client.keys("{ops}:process*") == []
