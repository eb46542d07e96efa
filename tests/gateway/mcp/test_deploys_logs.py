"""The agent tool `service_logs`, with the SDK's own client. The test plays the worker."""

import pytest

from tests.support.accounts import App
from tests.support.agents import Connect, call, refused
from tests.support.deploys import publish, report_phases

TOOL = "service_logs"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_log_of_a_deploy_and_of_the_start_command(connect: Connect, hosted: App) -> None:
    async with connect(hosted.gateway.address, hosted.account.key) as client:
        assert "no log yet" in await refused(client, TOOL, app=hosted.name)
        failed = (await publish(hosted.account, hosted.name)).json()["deployId"]
        await report_phases(hosted.gateway, failed, "build", ok=False, reason="no such file")
        expected = {"of": failed, "state": "failed", "log": ""}
        assert await call(client, TOOL, app=hosted.name) == expected
        assert await call(client, TOOL, app=hosted.name, deploy=failed, tail="5") == expected

        change = {"build": {"start": "node server.js"}}
        assert (await hosted.account.call("PATCH", f"/account/apps/{hosted.name}", change)).is_success
        assert await call(client, TOOL, app=hosted.name) == {"of": "start command", "log": ""}
        live = (await publish(hosted.account, hosted.name)).json()["deployId"]
        await report_phases(hosted.gateway, live, "build", "health", "canary")
        folder = hosted.gateway.data_folder / "running"
        folder.mkdir(exist_ok=True)
        (folder / f"{live}.output").write_text("one\ntwo\nthree\n")
        assert (await call(client, TOOL, app=hosted.name, tail=2))["log"] == "two\nthree\n"


async def test_errors_say_how_to_correct_the_call(connect: Connect, hosted: App) -> None:
    other = await hosted.account.app(hosted.backend)
    deploy = (await publish(hosted.account, other.name)).json()["deployId"]
    async with connect(hosted.gateway.address, hosted.account.key) as client:
        assert "app is needed" in await refused(client, TOOL)
        assert "tail must be a number from 1 to 2000" in await refused(client, TOOL, app=hosted.name, tail=0)
        for name in (deploy, "dep_none"):
            assert "NOT_FOUND" in await refused(client, TOOL, app=hosted.name, deploy=name)
