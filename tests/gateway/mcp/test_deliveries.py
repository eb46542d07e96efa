"""The agent tool `service_delivery` over both transports, with the SDK's own client. The test plays the worker."""

import pytest

from tests.support.accounts import App
from tests.support.agents import Connect, call, over_http, refused
from tests.support.gateway_process import Gateway
from tests.support.webhook_holder import read_queue, write_deliveries

TOOL = "service_delivery"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_list_show_and_redeliver(connect: Connect, gw: Gateway) -> None:
    account = await gw.account()
    write_deliveries(account, ("evt_0", "failed"), ("evt_1", "delivered"), ("evt_2", "failed"))
    async with connect(gw.address, account.key) as client:
        listed = (await call(client, TOOL, action="list", app="", outcome="failed"))["deliveries"]
        assert [row["id"] for row in listed] == ["evt_2", "evt_0"]
        assert (await call(client, TOOL, action="list", app="nobody")) == {"deliveries": []}
        shown = (await call(client, TOOL, action="show", id="evt_1"))["delivery"]
        assert (shown["outcome"], shown["response"]) == ("delivered", None)
        assert (await call(client, TOOL, action="redeliver", id="evt_2"))["id"] == "evt_2"
        assert await call(client, TOOL, action="redeliver_failed", since="1970-01-01") == {"count": 1}
        assert "RATE_LIMITED" in await refused(client, TOOL, action="redeliver_failed", since="1970-01-01")
    assert [event["id"] for event in read_queue(account)] == ["evt_2", "evt_0"]


async def test_errors_say_how_to_correct_the_call(app: App) -> None:
    async with over_http()(app.gateway.address, app.account.key) as client:
        assert "'list', 'show'" in await refused(client, TOOL, action="rotate")
        assert "needs id" in await refused(client, TOOL, action="redeliver")
        assert "needs since" in await refused(client, TOOL, action="redeliver_failed", since=5)
        assert "since: " in await refused(client, TOOL, action="redeliver_failed", since="lately")
        assert "outcome must be" in await refused(client, TOOL, action="list", outcome="lost")
        assert "NOT_FOUND" in await refused(client, TOOL, action="show", id="evt_none")
