"""The agent tool `service_delivery` with the SDK's own client. The test plays the worker."""

import pytest

from tests.support.agents import call, over_http, refused
from tests.support.gateway_process import Gateway
from tests.support.webhook_holder import read_queue, write_deliveries

TOOL = "service_delivery"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_list_show_and_redeliver(gw: Gateway) -> None:
    account = await gw.account()
    write_deliveries(account, ("evt_0", "failed"), ("evt_1", "delivered"), ("evt_2", "failed"))
    async with over_http()(gw.address, account.key) as client:
        listed = (await call(client, TOOL, action="list", app="", outcome="failed"))["deliveries"]
        assert [row["id"] for row in listed] == ["evt_2", "evt_0"]
        assert (await call(client, TOOL, action="list", app="nobody")) == {"deliveries": []}
        shown = (await call(client, TOOL, action="show", id="evt_1"))["delivery"]
        assert (shown["outcome"], shown["response"]) == ("delivered", None)
        assert (await call(client, TOOL, action="redeliver", id="evt_2"))["id"] == "evt_2"
        assert await call(client, TOOL, action="redeliver_failed", since="1970-01-01") == {"count": 1}
        assert "RATE_LIMITED" in await refused(client, TOOL, action="redeliver_failed", since="1970-01-01")
    assert [event["id"] for event in read_queue(account)] == ["evt_2", "evt_0"]
