"""The agent tool `service_delivery` over both transports, with the SDK's own client. The test plays the worker."""

import pytest

from gateway.events.keys import bodies_key, deliveries_key
from gateway.redis.partitions import partition_tag, stream_key
from tests.support.accounts import Account, App
from tests.support.agents import Connect, call, over_http, over_stdio, refused
from tests.support.gateway_process import Gateway

TOOL = "service_delivery"

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(params=[over_stdio, over_http()], ids=["stdio", "http"])
def connect(request: pytest.FixtureRequest) -> Connect:
    return request.param


def log(account: Account, *outcomes: str) -> None:
    """Writes deliveries of events evt_0, evt_1 … as a worker does."""
    log, bodies = deliveries_key(account.id), bodies_key(account.id)
    with account.gateway.redis.client() as client:
        for number, outcome in enumerate(outcomes):
            fields = {"id": f"evt_{number}", "type": "app.crashed", "app": "shop", "at": 1, "durationMs": 1}
            client.xadd(log, {**fields, "outcome": outcome, "status": "", "error": ""})
            client.hset(bodies, f"evt_{number}", "{}")
        client.expire(log, 600)
        client.expire(bodies, 600)


async def test_list_show_and_redeliver(connect: Connect, gw: Gateway) -> None:
    account = await gw.account()
    log(account, "failed", "delivered", "failed")
    async with connect(gw.address, account.key) as client:
        listed = (await call(client, TOOL, action="list", app="", outcome="failed"))["deliveries"]
        assert [row["id"] for row in listed] == ["evt_2", "evt_0"]
        assert (await call(client, TOOL, action="list", app="nobody")) == {"deliveries": []}
        shown = (await call(client, TOOL, action="show", id="evt_1"))["delivery"]
        assert (shown["outcome"], shown["response"]) == ("delivered", None)
        assert (await call(client, TOOL, action="redeliver", id="evt_2"))["id"] == "evt_2"
        assert await call(client, TOOL, action="redeliver_failed", since="1970-01-01") == {"count": 1}
        assert "RATE_LIMITED" in await refused(client, TOOL, action="redeliver_failed", since="1970-01-01")
    with account.gateway.redis.client() as client:
        waiting = client.xrange(stream_key(partition_tag(account.id), "events"))
    assert [fields[b"id"] for _, fields in waiting if fields[b"account"].decode() == account.id] == [b"evt_2", b"evt_0"]


async def test_errors_say_how_to_correct_the_call(app: App) -> None:
    async with over_http()(app.gateway.address, app.account.key) as client:
        assert "'list', 'show'" in await refused(client, TOOL, action="rotate")
        assert "needs id" in await refused(client, TOOL, action="redeliver")
        assert "needs since" in await refused(client, TOOL, action="redeliver_failed", since=5)
        assert "since: " in await refused(client, TOOL, action="redeliver_failed", since="lately")
        assert "outcome must be" in await refused(client, TOOL, action="list", outcome="lost")
        assert "NOT_FOUND" in await refused(client, TOOL, action="show", id="evt_none")
