"""Test events and redeliveries of one account share a limit per minute. tests/lua/events has more about its window."""

import asyncio
from collections import Counter

import httpx
import pytest

from gateway.events.webhooks import REQUESTS_PER_MINUTE
from gateway.keys import events_window_key
from tests.support.accounts import Account
from tests.support.gateway_process import Gateway
from tests.support.responses import refused
from tests.support.webhook_holder import DELIVERIES, WEBHOOK, read_queue, write_deliveries

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def send_sample(account: Account, at: Gateway | None = None) -> httpx.Response:
    return await account.call("POST", f"{WEBHOOK}/test", {"type": "app.crashed"}, at=at)


async def redeliver(account: Account, at: Gateway | None = None) -> httpx.Response:
    return await account.call("POST", f"{DELIVERIES}/evt_logged/redeliver", at=at)


async def test_of_many_concurrent_requests_thirty_pass(gw: Gateway, twin: Gateway) -> None:
    """Samples and redeliveries share the limit, over all processes. Other accounts have their own."""
    account = await gw.account()
    write_deliveries(account, ("evt_logged", "failed"))
    calls = [call(account, at) for _ in range(10) for call in (send_sample, redeliver) for at in (gw, twin)]
    answers = await asyncio.gather(*calls)
    assert Counter(answer.status_code for answer in answers) == {202: 30, 429: 10}
    assert len(read_queue(account)) == REQUESTS_PER_MINUTE == 30
    for answer in answers:
        if answer.status_code == 429:
            refused(answer, 429, "RATE_LIMITED")
            assert 55 <= int(answer.headers["Retry-After"]) <= 60
    with gw.redis.client() as client:
        assert client.llen(events_window_key(account.id)) == 30, "a refused request does not count"
        assert 0 < client.ttl(events_window_key(account.id)) <= 60
    assert (await send_sample(await gw.account())).status_code == 202
