"""Counters, and the usage of each account, in memory: written to Redis exactly once, or after a fault at most once."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest
import pytest_asyncio

from gateway.keys import requests_key, spend_by_provider_key, usage_by_provider_key, usage_keys
from gateway.telemetry.counters import MINUTE_KEY_SECONDS, PROCESS_SECONDS
from gateway.telemetry.usage import (
    Attempt,
    LoggedRequest,
    RequestDetails,
)
from tests.fakes import FakeAppBackend
from tests.fakes.provider import ROLE, chunk
from tests.fakes.server import CLOSE
from tests.gateway.conftest import Launch
from tests.support.counters import CountingProcess, request_line
from tests.support.prices import cost, max_cost
from tests.support.redis_servers import RedisServer
from tests.support.tcp_proxy import Proxy

HOUR, DAY, PROVIDERS, _ = usage_keys("acc", "2026-07-02T12")


@pytest_asyncio.fixture
async def local(redis_url: str) -> AsyncIterator[CountingProcess]:
    process = CountingProcess(redis_url)
    yield process
    await process.store.close()


async def logged(local: CountingProcess, account: str = "acc") -> list[LoggedRequest]:
    lines = await local.store.client.zrange(requests_key(account), 0, -1)
    return [msgspec.json.decode(each, type=LoggedRequest) for each in lines]


async def test_each_provider_has_its_counts(local: CountingProcess) -> None:
    """The last provider that was asked is the one that counts, also of all accounts; who asked none is not counted."""
    failed, answered = Attempt("paris-1", "PROVIDER_TIMEOUT", 30), Attempt("paris-2", "", 12)
    answer = {"model": "gpt", "input_tokens": 7, "output_tokens": 3, "nano_euro": 100}
    for account in ("acc", "acc", "other"):
        local.counters.count_request(account, request_line(**answer), RequestDetails(attempts=(failed, answered)))
    gone = request_line(model="gpt", code="CLIENT_GONE", nano_euro=50)
    late = request_line(model="gpt", code="PROVIDER_TIMEOUT")
    for line in (gone, late):
        local.counters.count_request("acc", line, RequestDetails(attempts=(failed,)))
    local.counters.count_request("acc", request_line(code="USER_RATE_LIMITED"))
    assert await local.counters.flush()
    whole = {"requests": 2, "inputTokens": 14, "outputTokens": 6, "nanoEuro": 200}
    counts = {"requests": 2, "refused": 1, "failed": 1, "interrupted": 1, "nanoEuro": 50, "interruptedNanoEuro": 50}
    of_failed = {f"paris-1/gpt/{name}": str(value) for name, value in counts.items()}
    expected = {f"paris-2/gpt/{name}": str(value) for name, value in whole.items()}
    assert await local.read_hash(PROVIDERS) == expected | of_failed
    assert await local.read_hash(usage_by_provider_key("other", "2026-07-02")) == {
        f"paris-2/gpt/{name}": str(value // 2) for name, value in whole.items()
    }
    of_all = {f"paris-2/gpt/{name}": str(value // 2 * 3) for name, value in whole.items()} | of_failed
    assert await local.read_hash(spend_by_provider_key("2026-07-02")) == of_all
    for key in (PROVIDERS, spend_by_provider_key("2026-07-02")):
        assert 0 < await local.store.client.ttl(key) <= 400 * 86_400


async def test_a_request_counts_in_the_minute_and_the_hour_of_its_end(local: CountingProcess) -> None:
    local.count_answers()
    local.now += 3600
    local.count_answers(times=2)
    await local.counters.flush()
    assert (await local.read_hash(HOUR))["notes/gpt/requests"] == "1"
    assert (await local.read_hash(HOUR.replace("T12", "T13")))["notes/gpt/requests"] == "2"
    assert (await local.read_hash(DAY))["notes/gpt/requests"] == "3"
    for hour, requests in (("12", "1"), ("13", "2")):
        assert (await local.read_hash(f"{{ops}}:minute:2026-07-02T{hour}:00"))["requests"] == requests
    assert len(await logged(local)) == 3


async def test_usage_is_not_sent_again_if_the_reply_is_lost(local: CountingProcess, valkey: RedisServer) -> None:
    async with Proxy(valkey.port) as proxy:
        peer = CountingProcess(proxy.url)
        peer.count_answers()
        await peer.counters.flush()
        peer.counters.count_request("acc", request_line())
        proxy.lose_answer = b"request-log:acc"
        await peer.counters.flush()
        await peer.counters.flush()
        assert (await local.read_hash(HOUR))["notes//requests"] == "1"
        assert len(await logged(local)) == 2
        assert peer.unlogged == 1  # it cannot know that the request was written
        await peer.store.close()


MINUTE = "{ops}:minute:2026-07-02T12:00"
SPEND = "spend-by-account:2026-07-02"


async def test_counts_are_written(local: CountingProcess) -> None:
    local.count_answers(times=2)
    local.counters.count_request("acc", request_line(code="USER_RATE_LIMITED"))
    local.counters.count_request("acc", request_line(code="CLIENT_GONE", nano_euro=50))
    local.counters.count_request("", request_line(app="", code="APP_NOT_FOUND"))
    assert await local.counters.flush()
    assert await local.read_hash(MINUTE) == {
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
    spent = await local.store.client.zrange(SPEND, 0, -1, withscores=True)
    assert dict(spent) == {"acc": 250.0, "total": 250.0}
    assert MINUTE_KEY_SECONDS - 5 < await local.store.client.ttl(MINUTE) <= MINUTE_KEY_SECONDS


async def test_each_flush_writes_only_new_counts(local: CountingProcess) -> None:
    for _ in range(3):
        local.count_answers()
        await asyncio.gather(*(local.counters.flush() for _ in range(5)))
    assert (await local.read_hash(MINUTE))["requests"] == "3"


async def test_a_time_counts_in_the_first_bucket_that_fits(local: CountingProcess) -> None:
    for ms in (0.0, 10.0, 10.1, 30_000.0, 31_000.0):
        local.counters.count_request("acc", request_line(ttft_ms=ms))
    await local.counters.flush()
    found = {name: count for name, count in (await local.read_hash(MINUTE)).items() if name.startswith("ttft:")}
    assert found == {"ttft:10": "2", "ttft:20": "1", "ttft:30000": "1", "ttft:more": "1"}


async def test_counts_are_not_sent_again_if_the_reply_is_lost(local: CountingProcess, valkey: RedisServer) -> None:
    async with Proxy(valkey.port) as proxy:
        peer = CountingProcess(proxy.url)
        peer.count_answers()
        await peer.counters.flush()
        peer.count_answers()
        proxy.lose_answer = b"EVALSHA"
        await peer.counters.flush()
        await peer.counters.flush()
        assert (await local.read_hash(MINUTE))["requests"] == "2"
        await peer.store.close()


async def test_counts_that_waited_too_long_are_dropped() -> None:
    async with AsyncExitStack() as later:
        peer = CountingProcess("redis://127.0.0.1:1/0", max_wait_seconds=0.5)
        later.push_async_callback(peer.store.close)
        peer.count_answers(times=5)
        assert not await peer.counters.flush()
        assert (len(peer.counters._tallies), peer.counters._usage.count_waiting()) == (5, 1)
        await asyncio.sleep(0.6)
        assert not await peer.counters.flush()
        assert (peer.counters._tallies, peer.counters._usage.count_waiting()) == ({}, 0)
        peer.count_answers("other")  # counting continues
        assert (len(peer.counters._tallies), peer.counters._usage.count_waiting()) == (5, 1)
        assert [write.account for write in peer.counters._usage._take_writes()] == ["other"]
        assert peer.unlogged == 5


async def test_a_process_has_a_heartbeat_until_it_stops(local: CountingProcess) -> None:
    await local.counters.flush()
    [process] = await local.store.client.smembers("{ops}:processes")
    life = await local.read_hash(f"{{ops}}:process:{process}")
    assert life["streams"] == "3"
    assert {"startedAt", "seenAt"} < life.keys()
    for key in ("{ops}:processes", f"{{ops}}:process:{process}"):
        assert 0 < await local.store.client.ttl(key) <= PROCESS_SECONDS
    local.count_answers()
    await local.counters.close()
    assert (await local.read_hash(MINUTE))["requests"] == "1"
    assert await local.store.client.keys("{ops}:process*") == []


# -- in a running gateway ------------------------------------------------------------------------------------

session = pytest.mark.asyncio(loop_scope="session")


@session
async def test_a_gateway_without_streams_stops_at_once_and_writes_all_counts(
    launch: Launch, backend: FakeAppBackend
) -> None:
    async with launch() as gw:
        app = await gw.app(backend)
        cut = gw.provider.plays(ROLE, chunk("a"), CLOSE)
        await app.ask("xx", token=app.token("ana"))
        await app.ask(cut)
        began = time.monotonic()
        assert await gw.stop() in (0, -signal.SIGTERM)
        assert time.monotonic() - began < 3
        with gw.redis.client() as client:
            [spend] = client.keys("spend-by-account:*")
            settled = cost(7, 3) + max_cost(cut)
            assert dict(client.zrange(spend, 0, -1, withscores=True)) == {
                b"total": settled,
                app.account.id.encode(): settled,
            }
            minutes = [client.hgetall(key) for key in client.keys("{ops}:minute:*")]
            assert sum(int(minute[b"requests"]) for minute in minutes) == 2
            assert sum(int(minute.get(b"code:PROVIDER_ERROR", 0)) for minute in minutes) == 1
            assert client.zcard(requests_key(app.account.id)) == 2
            assert client.keys("{ops}:process*") == []
