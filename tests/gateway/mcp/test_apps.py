"""The agent tool `service_app`, with the SDK's own client."""

import secrets

import pytest

from tests.support.accounts import App
from tests.support.agents import Connect, call, refused

TOOL = "service_app"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_create_set_show_list_and_delete(connect: Connect, hosted: App) -> None:
    name = f"mine-{secrets.token_hex(4)}"
    async with connect(hosted.gateway.address, hosted.account.key) as client:
        created = (await call(client, TOOL, action="create", app=name))["app"]
        assert (created["name"], created["status"]) == (name, "unknown") or created["name"] == name
        build = {"command": "npm run build", "output": "out"}
        settings = (await call(client, TOOL, action="set", app=name, build=build))["settings"]
        assert settings["build"] == build
        secret = {"kind": "secret", "secret": secrets.token_hex(20)}
        answered = await call(client, TOOL, action="set", app=name, auth=secret, repository=None)
        assert answered["settings"]["auth"]["kind"] == "secret"
        assert secret["secret"] not in str(answered)
        assert answered["settings"]["build"] == build
        assert (await call(client, TOOL, action="show", app=name))["app"]["settings"]["build"] == build
        assert (await call(client, TOOL, action="set", app=name, build=None))["settings"]["build"] is None
        assert {app["name"] for app in (await call(client, TOOL, action="list"))["apps"]} == {name, hosted.name}
        assert await call(client, TOOL, action="delete", app=name) == {"deleted": name}
        assert "NOT_FOUND" in await refused(client, TOOL, action="show", app=name)
