"""The agent tool `service_deploy` over both transports, with the SDK's own client. The test plays the deploy engine."""

import pytest

from tests.support.accounts import App
from tests.support.agents import Connect, call
from tests.support.deploys import publish, report_phases

TOOL = "service_deploy"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def go_live(app: App) -> str:
    deploy: str = (await publish(app.account, app.name)).json()["deployId"]
    await report_phases(app.gateway, deploy, "build", "health", "canary")
    return deploy


async def test_list_show_rollback_and_cancel(connect: Connect, hosted: App) -> None:
    first, second = await go_live(hosted), await go_live(hosted)
    async with connect(hosted.gateway.address, hosted.account.key) as client:
        listed = (await call(client, TOOL, action="list", app="", id=""))["deploys"]
        assert [deploy["id"] for deploy in listed][:2] == [second, first]
        assert (await call(client, TOOL, action="list", app=hosted.name))["deploys"] == listed
        shown = (await call(client, TOOL, action="show", id=second))["deploy"]
        assert (shown["state"], shown["log"]) == ("live", "")
        back = (await call(client, TOOL, action="rollback", app=hosted.name))["deployId"]
        assert (await call(client, TOOL, action="show", id=back))["deploy"]["release"] == first
        assert (await call(client, TOOL, action="cancel", id=back))["deploy"]["state"] == "canceled"
        again = (await call(client, TOOL, action="rollback", app=hosted.name, id=first))["deployId"]
        assert again != back
