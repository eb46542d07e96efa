"""The usage of each account, counted in memory and written at most once."""

import msgspec
import pytest

from gateway.keys import requests_key, spend_by_provider_key, usage_by_provider_key, usage_keys
from gateway.telemetry.usage import (
    LOGGED_REQUESTS,
    MAX_WAITING_REQUESTS,
    Attempt,
    LoggedRequest,
    RequestDetails,
)
from tests.support.counters import CountingProcess, request_line
from tests.support.redis_servers import RedisServer
from tests.support.tcp_proxy import Proxy

HOUR, DAY, PROVIDERS, REQUESTS = usage_keys("acc", "2026-07-02T12")


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


async def test_requests_during_a_heartbeat_count_for_their_provider(
    local: CountingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    details = RequestDetails(attempts=(Attempt("paris-1", "", 12),))
    beat = local.counters._write_heartbeat

    async def count_meanwhile() -> None:
        await beat()
        local.counters.count_request("acc", request_line(model="gpt", nano_euro=100), details)

    monkeypatch.setattr(local.counters, "_write_heartbeat", count_meanwhile)
    for _ in range(3):
        local.counters.count_request("acc", request_line(model="gpt", nano_euro=100), details)
        await local.counters.flush()
    await local.counters.flush()
    of_all = await local.read_hash(spend_by_provider_key("2026-07-02"))
    assert of_all == await local.read_hash(PROVIDERS) == {"paris-1/gpt/requests": "7", "paris-1/gpt/nanoEuro": "700"}


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


async def test_while_redis_is_unavailable_the_oldest_requests_are_dropped(
    local: CountingProcess, valkey: RedisServer
) -> None:
    async with Proxy(valkey.port) as proxy:
        peer = CountingProcess(proxy.url)
        proxy.go_down()
        for n in range(MAX_WAITING_REQUESTS + 3):
            peer.counters.count_request("acc", request_line(request_id=f"r{n}"))
            if n % 5_000 == 0:
                assert not await peer.counters.flush()
        assert peer.unlogged == 3
        proxy.down = False
        assert await peer.counters.flush()
        newest = range(MAX_WAITING_REQUESTS + 3 - LOGGED_REQUESTS, MAX_WAITING_REQUESTS + 3)
        assert {request.id for request in await logged(local)} == {f"r{n}" for n in newest}
        assert (await local.read_hash(HOUR))["notes//requests"] == str(MAX_WAITING_REQUESTS + 3)
        assert (await local.read_hash("{ops}:minute:2026-07-02T12:00"))["requests"] == str(MAX_WAITING_REQUESTS + 3)
        await peer.store.close()
