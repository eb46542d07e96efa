"""What each account used: counted in memory, written with the counters, never twice."""

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from gateway.telemetry import counters as counters_module
from gateway.telemetry import usage as usage_module
from gateway.telemetry.keys import requests_key, usage_keys
from gateway.telemetry.usage import LoggedRequest, outcome_of
from tests.gateway.telemetry.desk import Desk, line
from tests.support.redis_servers import RedisServer
from tests.support.tcp_proxy import Proxy

HOUR, DAY, REQUESTS = usage_keys("acc", "2026-07-02T12")


@pytest_asyncio.fixture
async def desk(redis_url: str) -> AsyncIterator[Desk]:
    desk = Desk(redis_url)
    yield desk
    await desk.store.close()


async def logged(desk: Desk, account: str = "acc") -> list[LoggedRequest]:
    lines = await desk.store.client.lrange(requests_key(account), 0, -1)
    return [msgspec.json.decode(each, type=LoggedRequest) for each in lines]


@pytest.mark.parametrize(
    ("code", "nano_euro", "outcome"),
    [
        ("", 5, "answered"),
        ("", 0, "answered"),
        ("CLIENT_GONE", 5, "interrupted"),
        ("CLIENT_GONE", 0, "interrupted"),
        ("PROVIDER_ERROR", 5, "interrupted"),
        ("PROVIDER_ERROR", 0, "refused"),
        ("USER_RATE_LIMITED", 0, "refused"),
    ],
)
def test_outcomes(code: str, nano_euro: int, outcome: str) -> None:
    assert outcome_of(code, nano_euro) == outcome


async def test_each_app_and_model_has_its_counts(desk: Desk) -> None:
    desk.count(times=2)
    desk.counters.request("acc", line(model="gpt", code="CLIENT_GONE", nano_euro=50))
    desk.counters.request("acc", line(code="USER_RATE_LIMITED"))
    desk.counters.request("acc", line(app="shop", model="qwen", nano_euro=7, input_tokens=1, output_tokens=2))
    desk.counters.request("other", line())
    desk.counters.request("", line(app="", code="APP_NOT_FOUND"))
    assert await desk.counters.flush()
    expected = {
        "notes/gpt/requests": "3",
        "notes/gpt/interrupted": "1",
        "notes/gpt/inputTokens": "14",
        "notes/gpt/outputTokens": "6",
        "notes/gpt/nanoEuro": "250",
        "notes/gpt/interruptedNanoEuro": "50",
        "notes//requests": "1",
        "notes//refused": "1",
        "shop/qwen/requests": "1",
        "shop/qwen/inputTokens": "1",
        "shop/qwen/outputTokens": "2",
        "shop/qwen/nanoEuro": "7",
    }
    assert await desk.held(HOUR) == await desk.held(DAY) == expected
    assert [len(await logged(desk, account)) for account in ("acc", "other", "")] == [5, 1, 0]


async def test_what_is_logged_of_a_request(desk: Desk) -> None:
    answer = line(request_id="a1", model="gpt", nano_euro=9, input_tokens=7, output_tokens=3, ttft_ms=120.4)
    desk.counters.request("acc", answer)
    desk.counters.request("acc", line(request_id="a2", status=429, code="USER_RATE_LIMITED", duration_ms=1.4))
    await desk.counters.flush()
    began = round(answer.timestamp.timestamp() * 1000 - 500)
    first, second = await logged(desk)
    assert first == LoggedRequest("a1", began, "notes", "gpt", 200, "", 7, 3, 9, 120, 500)
    assert (second.status, second.code, second.ttftMs, second.durationMs) == (429, "USER_RATE_LIMITED", None, 1)


async def test_requests_during_a_write_are_counted(desk: Desk) -> None:
    desk.count()
    await desk.counters.flush()
    desk.count()
    desk.counters._usage._take()  # lost on purpose: only what follows is looked at
    desk.count(times=3)
    await desk.counters.flush()
    assert (await desk.held(HOUR))["notes/gpt/requests"] == "4"


async def test_a_request_counts_in_the_hour_it_ends_in(desk: Desk) -> None:
    desk.count()
    desk.now += 3600
    desk.count(times=2)
    await desk.counters.flush()
    assert (await desk.held(HOUR))["notes/gpt/requests"] == "1"
    assert (await desk.held(HOUR.replace("T12", "T13")))["notes/gpt/requests"] == "2"
    assert (await desk.held(DAY))["notes/gpt/requests"] == "3"
    assert len(await logged(desk)) == 3


async def test_what_is_refused_waits_with_what_comes_meanwhile(desk: Desk) -> None:
    await desk.store.client.set(HOUR, "another kind", ex=60)
    desk.count()
    await desk.counters.flush()
    desk.count(times=2)
    await desk.counters.flush()
    await desk.store.client.delete(HOUR)
    await desk.counters.flush()
    assert (await desk.held(HOUR))["notes/gpt/requests"] == "3"
    assert len(await logged(desk)) == 3


async def test_an_answer_that_is_lost_is_not_repeated(desk: Desk, valkey: RedisServer) -> None:
    async with Proxy(valkey.port) as proxy:
        there = Desk(proxy.url)
        there.count()
        await there.counters.flush()
        there.counters.request("acc", line())
        proxy.lose_answer = b"requests:acc"
        await there.counters.flush()
        await there.counters.flush()
        assert (await desk.held(HOUR))["notes//requests"] == "1"
        assert len(await logged(desk)) == 2
        assert there.unlogged == 1  # for all that it knows
        await there.store.close()


async def test_while_redis_is_away_the_oldest_requests_are_dropped_and_counted(
    desk: Desk, valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "MOST_WAITING", 10)
    async with Proxy(valkey.port) as proxy:
        there = Desk(proxy.url)
        proxy.go_down()
        for n in range(13):
            there.counters.request("acc", line(request_id=f"r{n}"))
            if n % 6 == 0:
                assert not await there.counters.flush()
        assert there.unlogged == 3
        proxy.down = False
        assert await there.counters.flush()
        assert [request.id for request in await logged(desk)] == [f"r{n}" for n in range(3, 13)]
        assert (await desk.held(HOUR))["notes//requests"] == "13"
        await there.store.close()


async def test_what_has_waited_too_long_is_dropped(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> None:
    there = Desk(redis_url)
    there.count(times=5)
    monkeypatch.setattr(counters_module, "PATIENCE", -1.0)
    there.counters._drop_old()
    there.counters.request("other", line())
    assert await there.counters.flush()
    assert await there.held(HOUR) == {}
    assert there.unlogged == 5
    assert len(await logged(there, "other")) == 1
    await there.store.close()


async def test_no_more_is_sent_than_a_log_keeps(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "LOGGED", 3)
    for n in range(5):
        desk.counters.request("acc", line(request_id=f"r{n}"))
    await desk.counters.flush()
    assert [request.id for request in await logged(desk)] == ["r2", "r3", "r4"]
    assert desk.unlogged == 0
