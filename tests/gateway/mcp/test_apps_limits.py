"""The agent tool `service_limits`, with the SDK's own client."""

import pytest

from tests.support.accounts import App
from tests.support.agents import Connect, call

TOOL = "service_limits"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_show_and_set(connect: Connect, app: App) -> None:
    async with connect(app.gateway.address, app.account.key) as client:
        none = (await call(client, TOOL, action="show", app=app.name))["limits"]
        assert set(none.values()) == {None}
        limits = (await call(client, TOOL, action="set", app=app.name, dailyEuro="0.02", requestsPerMinute=0))["limits"]
        assert limits == {**none, "dailyEuro": "0.02", "requestsPerMinute": 0}
        shown = await call(client, TOOL, action="show", app=app.name)
        assert (shown["limits"], shown["spend"]["cap"]) == (limits, 20_000_000)
        assert shown["spend"]["widest"]["requestsPerMinute"] >= 1
        cleared = await call(client, TOOL, action="set", app=app.name, dailyEuro=None)
        assert cleared["limits"] == {**none, "requestsPerMinute": 0}
