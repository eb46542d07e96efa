"""The usage of each account, counted in memory and written at most once."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from gateway.keys import requests_key, spend_by_provider_key, usage_by_provider_key, usage_keys
from gateway.telemetry.usage import (
    LOGGED_REQUESTS,
    MAX_WAITING_REQUESTS,
    Attempt,
    LoggedRequest,
    RequestDetails,
    outcome_of,
)
from tests.support.counters import NOON, CountingProcess, request_line
from tests.support.redis_servers import RedisServer
from tests.support.tcp_proxy import Proxy

HOUR, DAY, PROVIDERS, REQUESTS = usage_keys("acc", "2026-07-02T12")


async def logged(local: CountingProcess, account: str = "acc") -> list[LoggedRequest]:
    lines = await local.store.client.zrange(requests_key(account), 0, -1)
    return [msgspec.json.decode(each, type=LoggedRequest) for each in lines]


@pytest.mark.parametrize(
    ("code", "nano_euro", "outcome"),
    [("", 0, "answered"), ("CLIENT_GONE", 0, "interrupted"), ("PROVIDER_ERROR", 5, "interrupted")],
)
def test_outcomes(code: str, nano_euro: int, outcome: str) -> None:
    """Of those that the counts below do not have."""
    assert outcome_of(code, nano_euro) == outcome


async def test_each_app_and_model_has_its_counts(local: CountingProcess) -> None:
    local.count_answers(times=2)
    local.counters.count_request("acc", request_line(model="gpt", code="CLIENT_GONE", nano_euro=50))
    local.counters.count_request("acc", request_line(code="USER_RATE_LIMITED"))
    local.counters.count_request("acc", request_line(code="PROVIDER_REFUSED"))
    local.counters.count_request("acc", request_line(code="PROVIDER_TIMEOUT"))
    local.counters.count_request(
        "acc", request_line(app="shop", model="qwen", nano_euro=7, input_tokens=1, output_tokens=2)
    )
    local.counters.count_request("other", request_line())
    local.counters.count_request("", request_line(app="", code="APP_NOT_FOUND"))
    assert await local.counters.flush()
    expected = {
        "notes/gpt/requests": "3",
        "notes/gpt/interrupted": "1",
        "notes/gpt/inputTokens": "14",
        "notes/gpt/outputTokens": "6",
        "notes/gpt/nanoEuro": "250",
        "notes/gpt/interruptedNanoEuro": "50",
        "notes//requests": "3",
        "notes//refused": "3",
        "notes//failed": "1",
        "shop/qwen/requests": "1",
        "shop/qwen/inputTokens": "1",
        "shop/qwen/outputTokens": "2",
        "shop/qwen/nanoEuro": "7",
    }
    assert await local.read_hash(HOUR) == await local.read_hash(DAY) == expected
    assert [len(await logged(local, account)) for account in ("acc", "other", "")] == [7, 1, 0]


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


async def test_a_request_is_logged(local: CountingProcess) -> None:
    answer = request_line(request_id="a1", model="gpt", nano_euro=9, input_tokens=7, output_tokens=3, ttft_ms=120.4)
    local.counters.count_request("acc", answer, RequestDetails(None, 80, 12, ((100, 80), None)))
    local.counters.count_request(
        "acc",
        request_line(request_id="a2", status=401, code="TOKEN_INVALID", duration_ms=1.4),
        RequestDetails("expired"),
    )
    await local.counters.flush()
    began = round(answer.timestamp.timestamp() * 1000 - 500)
    first, second = await logged(local)
    assert first == LoggedRequest(
        "a1", began, "notes", "gpt", 200, "", 7, 3, 9, 120, 500, None, 80, 12, ((100, 80), None)
    )
    assert (second.status, second.code, second.ttftMs, second.durationMs) == (401, "TOKEN_INVALID", None, 1)
    assert (second.reason, second.reservedNanoEuro, second.limits) == ("expired", 0, ())


async def test_requests_are_logged_in_the_order_of_their_arrival(local: CountingProcess, redis_url: str) -> None:
    """A process that writes late, or whose requests took long, does not put its requests above later ones."""
    peer, noon = CountingProcess(redis_url), datetime.fromtimestamp(NOON, UTC)
    for process, offset in ((local, 0), (peer, 1), (local, 2), (peer, 3)):
        ended, took = noon + timedelta(milliseconds=offset + 700 * (offset % 2)), 500.0 + 700 * (offset % 2)
        line = request_line(request_id=f"r{offset}", timestamp=ended, duration_ms=took)
        process.counters.count_request("acc", line)
    await peer.counters.flush()
    await local.counters.flush()
    await peer.store.close()
    assert [request.id for request in await logged(local)] == ["r0", "r1", "r2", "r3"]


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
