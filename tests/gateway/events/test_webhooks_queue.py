"""All events whose newest delivery failed are queued again; so are test events. No worker takes them here."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from gateway.events.webhooks import REQUESTS_PER_MINUTE
from gateway.ids import new_id, now_iso, time_of
from gateway.keys import events_window_key, redelivered_key
from tests.fakes.receiver import FakeReceiver
from tests.support.gateway_process import Gateway
from tests.support.responses import refused
from tests.support.webhook_holder import DELIVERIES, WEBHOOK, Holder, read_queue, write_deliveries

pytestmark = pytest.mark.asyncio(loop_scope="session")
REDELIVER = f"{DELIVERIES}/redeliver"
LONG_AGO = "2020-01-01"


async def redeliver(holder: Holder, since: str = LONG_AGO) -> int:
    """Returns the number of queued events. The account need not wait for a minute."""
    with holder.account.gateway.redis.client() as client:
        client.delete(redelivered_key(holder.id))
    response = await holder.call("POST", REDELIVER, {"since": since, "outcome": "failed"})
    assert response.status_code == 202, response.text
    assert response.json().keys() == {"count"}
    count: int = response.json()["count"]
    return count


def queued(holder: Holder) -> list[str]:
    return [event["id"] for event in read_queue(holder.account)]


async def test_the_newest_delivery_of_an_event_decides(holder: Holder) -> None:
    write_deliveries(
        holder.account,
        ("evt_mended", "failed"),
        ("evt_broken", "delivered"),
        ("evt_dropped", "dropped"),
        ("evt_failed", "failed"),
        ("evt_failed", "failed"),
        ("evt_mended", "delivered"),
        ("evt_broken", "failed"),
    )
    assert await redeliver(holder) == 2
    assert sorted(queued(holder)) == ["evt_broken", "evt_failed"]
    assert await redeliver(holder) == 0, "both wait already"


async def test_since_is_about_the_time_of_the_event(holder: Holder) -> None:
    """Not of its delivery, which may be a redelivery of today."""
    young = new_id("evt")
    old = f"evt_{time_of(young) - 3_600_000:011x}{'0' * 10}"
    write_deliveries(holder.account, (young, "failed"), (old, "failed"))
    happened = time_of(young) / 1000
    assert await redeliver(holder, now_iso(happened + 0.001)) == 0
    assert await redeliver(holder, now_iso(happened)) == 1
    assert queued(holder) == [young]
    east = datetime.fromtimestamp(happened, UTC) + timedelta(hours=2)
    assert await redeliver(holder, east.strftime("%Y-%m-%dT%H:%M:%S+02:00")) == 0, "it waits already"
    assert await redeliver(holder) == 1, "the oldest one too"


async def test_a_thousand_at_most_and_the_oldest_first(holder: Holder) -> None:
    events = [f"evt_{n:04}" for n in range(1_000)]
    write_deliveries(holder.account, *((event, "failed") for event in events))
    assert await redeliver(holder) == 1_000
    assert queued(holder) == events


async def test_once_a_minute(holder: Holder, gw: Gateway, twin: Gateway, receiver: FakeReceiver) -> None:
    write_deliveries(holder.account, ("evt_1", "failed"))
    body = {"since": LONG_AGO, "outcome": "failed"}
    calls = (holder.account.call("POST", REDELIVER, body, at=process) for process in (gw, twin) * 3)
    answers = await asyncio.gather(*calls)
    assert Counter(each.status_code for each in answers) == {202: 1, 429: 5}
    for each in answers:
        if each.status_code == 429:
            assert "once per minute" in refused(each, 429, "RATE_LIMITED")["message"]
            assert 55 <= int(each.headers["Retry-After"]) <= 60
    assert queued(holder) == ["evt_1"]
    other = Holder(await gw.account(), receiver)
    assert await redeliver(other) == 0, "each account has a minute of its own"


async def test_a_malformed_redelivery(holder: Holder) -> None:
    long, late = "1" * 5_000, "9999-12-31T23:59:59-23:59\r\nX-Evil: 1"
    for body, field in (
        *(({"outcome": "failed", "since": since}, "since") for since in ("yesterday", "", 1782979200, late, long)),
        *(({}, "since"), ({"since": LONG_AGO}, "outcome"), ({"since": LONG_AGO, "outcome": "delivered"}, "outcome")),
        ({"since": LONG_AGO, "outcome": "failed", "limit": 5}, "limit"),
    ):
        message = refused(await holder.call("POST", REDELIVER, body), 400, "REQUEST_MALFORMED")["message"]
        assert field in message
        assert "Evil" not in message
    with holder.account.gateway.redis.client() as client:
        assert not client.exists(redelivered_key(holder.id)), "it does not count"
    for since in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-W30-1"):
        assert await redeliver(holder, since) == 0


# -- the limit of test events and redeliveries. tests/lua/events has more about its window -------------------


async def test_of_many_concurrent_requests_thirty_pass(gw: Gateway, twin: Gateway) -> None:
    """Samples and redeliveries share the limit, over all processes. Other accounts have their own."""
    account = await gw.account()
    write_deliveries(account, ("evt_logged", "failed"))
    sample = (f"{WEBHOOK}/test", {"type": "app.crashed"})
    requests = (sample, (f"{DELIVERIES}/evt_logged/redeliver", None))
    calls = [account.call("POST", *request, at=at) for _ in range(10) for request in requests for at in (gw, twin)]
    answers = await asyncio.gather(*calls)
    assert Counter(each.status_code for each in answers) == {202: 30, 429: 10}
    assert len(read_queue(account)) == REQUESTS_PER_MINUTE == 30
    for each in answers:
        if each.status_code == 429:
            refused(each, 429, "RATE_LIMITED")
            assert 55 <= int(each.headers["Retry-After"]) <= 60
    with gw.redis.client() as client:
        assert client.llen(events_window_key(account.id)) == 30, "a refused request does not count"
        assert 0 < client.ttl(events_window_key(account.id)) <= 60
    assert (await (await gw.account()).call("POST", *sample)).status_code == 202
