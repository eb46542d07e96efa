"""Test events and redeliveries of one account share a limit per minute."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.events.webhooks import REQUESTS_PER_MINUTE
from gateway.keys import bodies_key, events_window_key
from tests.support.accounts import Account
from tests.support.gateway_process import Gateway
from tests.support.responses import refused
from tests.support.webhook_holder import read_queue, write_deliveries

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Holder:
    def __init__(self, account: Account) -> None:
        self.account, self.id = account, account.id

    async def post(self, path: str, body: Any = None, at: Gateway | None = None) -> httpx.Response:
        return await self.account.call("POST", f"/account/{path}", body, at=at)

    async def test(self, at: Gateway | None = None) -> httpx.Response:
        return await self.post("webhook/test", {"type": "app.crashed"}, at)

    async def redeliver(self, event: str = "evt_logged", at: Gateway | None = None) -> httpx.Response:
        return await self.post(f"deliveries/{event}/redeliver", at=at)

    def data(self, event: str) -> str:
        """Returns the stored data of an event."""
        with self.account.gateway.redis.client() as client:
            return client.hget(bodies_key(self.id), event).decode()

    def pass_time(self, seconds: float) -> None:
        """Moves the times of the window into the past."""
        with self.account.gateway.redis.client() as client:
            key = events_window_key(self.id)
            for n, moment in enumerate(client.lrange(key, 0, -1)):
                client.lset(key, n, f"{int(moment) - seconds * 1e6:.0f}")


@pytest_asyncio.fixture(loop_scope="session")
async def holder(gw: Gateway) -> Holder:
    return Holder(await gw.account())


async def test_of_many_concurrent_requests_thirty_pass(holder: Holder, gw: Gateway, twin: Gateway) -> None:
    """Samples and redeliveries share the limit, over all processes."""
    write_deliveries(holder.account, ("evt_logged", "failed"))
    calls = [call(at=process) for _ in range(25) for call in (holder.test, holder.redeliver) for process in (gw, twin)]
    answers = await asyncio.gather(*calls)
    assert Counter(answer.status_code for answer in answers) == {202: 30, 429: 70}
    assert len(read_queue(holder.account)) == REQUESTS_PER_MINUTE == 30
    for answer in answers:
        if answer.status_code == 429:
            refused(answer, 429, "RATE_LIMITED")
            assert 55 <= int(answer.headers["Retry-After"]) <= 60
    with gw.redis.client() as client:
        assert client.llen(events_window_key(holder.id)) == 30, "a refused request does not count"
        assert 0 < client.ttl(events_window_key(holder.id)) <= 60


async def test_a_request_passes_after_retry_after(holder: Holder) -> None:
    for _ in range(REQUESTS_PER_MINUTE):
        assert (await holder.test()).status_code == 202
    wait = int((await holder.test()).headers["Retry-After"])
    holder.pass_time(wait - 2)
    again = await holder.test()
    refused(again, 429, "RATE_LIMITED")
    assert 1 <= int(again.headers["Retry-After"]) <= 2
    holder.pass_time(int(again.headers["Retry-After"]))
    assert (await holder.test()).status_code == 202


async def test_each_account_has_a_limit_of_its_own(holder: Holder, gw: Gateway) -> None:
    await asyncio.gather(*(holder.test() for _ in range(REQUESTS_PER_MINUTE)))
    refused(await holder.redeliver(), 429, "RATE_LIMITED")
    assert (await Holder(await gw.account()).test()).status_code == 202


async def test_a_redelivery_of_an_unknown_event_counts(holder: Holder) -> None:
    """It searches the log, and the limit protects against that work."""
    for _ in range(REQUESTS_PER_MINUTE):
        refused(await holder.redeliver("evt_none"), 404, "NOT_FOUND")
    refused(await holder.redeliver("evt_none"), 429, "RATE_LIMITED")
    refused(await holder.test(), 429, "RATE_LIMITED")
    assert read_queue(holder.account) == []


async def test_a_sample_of_an_unknown_type_does_not_count(holder: Holder) -> None:
    for _ in range(REQUESTS_PER_MINUTE + 1):
        refused(await holder.post("webhook/test", {"type": "app.bored"}), 400, "REQUEST_MALFORMED")
    assert (await holder.test()).status_code == 202


async def test_a_redelivery_repeats_the_event(holder: Holder) -> None:
    events = ("evt_other", "evt_logged", *(f"evt_{n}" for n in range(120)))
    write_deliveries(holder.account, *((event, "failed") for event in events))
    assert (await holder.redeliver()).status_code == 202
    [event] = read_queue(holder.account)
    event.pop("at")
    assert event == {
        "id": "evt_logged",
        "account": holder.id,
        "app": "shop",
        "type": "app.crashed",
        "redelivery": "1",
    }
    assert holder.data("evt_logged") == '{"n":1}'
