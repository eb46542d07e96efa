"""All events whose newest delivery failed are sent again, since a time, once a minute."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.accounts.vault import Vault
from gateway.errors import BackboneUnavailable
from gateway.events import scripts
from gateway.events.webhooks import Webhooks
from gateway.ids import new_id, now_iso, time_of
from gateway.keys import redelivered_key
from tests.fakes.receiver import FakeReceiver
from tests.support.gateway_process import Gateway
from tests.support.responses import refused
from tests.support.stores import opened
from tests.support.webhook_holder import DELIVERIES, Holder, read_queue, write_deliveries

pytestmark = pytest.mark.asyncio(loop_scope="session")
REDELIVER = f"{DELIVERIES}/redeliver"
LONG_AGO = "2020-01-01"


def forget(holder: Holder) -> None:
    """Ends the minute in which the account cannot repeat its request."""
    with holder.account.gateway.redis.client() as client:
        client.delete(redelivered_key(holder.id))


async def redeliver(holder: Holder, since: str = LONG_AGO) -> int:
    forget(holder)
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
    assert Counter(answer.status_code for answer in answers) == {202: 1, 429: 5}
    for answer_ in answers:
        if answer_.status_code == 429:
            assert "once per minute" in refused(answer_, 429, "RATE_LIMITED")["message"]
            assert 55 <= int(answer_.headers["Retry-After"]) <= 60
    assert queued(holder) == ["evt_1"]
    other = Holder(await gw.account(), receiver)
    assert await redeliver(other) == 0, "each account has a minute of its own"


async def test_an_interrupted_redelivery_can_be_repeated(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that are already queued are not queued again."""
    events = [f"evt_{n:03}" for n in range(120)]
    write_deliveries(holder.account, *((event, "failed") for event in events))
    batches: list[int] = []

    async def break_after_two(*args: Any) -> int:
        if len(batches) == 2:
            raise BackboneUnavailable
        batches.append(await redeliver_batch(*args))
        return batches[-1]

    redeliver_batch = scripts.redeliver_events
    monkeypatch.setattr(scripts, "redeliver_events", break_after_two)
    async with opened(holder.account.gateway.redis.url) as store:
        webhooks = Webhooks(store, Vault(""), allow_private=True)
        with pytest.raises(BackboneUnavailable) as broke:
            await webhooks.redeliver_failed(holder.id, "1970-01-01")
    assert "try again in a minute to queue the rest" in broke.value.message
    assert broke.value.retry_after == 60
    assert batches == [50, 50]
    assert queued(holder) == events[:100]
    assert await redeliver(holder) == 20
    assert queued(holder) == events


async def test_malformed(holder: Holder) -> None:
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
