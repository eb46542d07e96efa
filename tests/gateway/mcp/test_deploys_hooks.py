"""The agent tool `service_hook`, with the SDK's own client."""

import pytest

from tests.fakes import FakeAppBackend
from tests.support.accounts import App
from tests.support.agents import Connect, call, over_http, refused

TOOL = "service_hook"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_create_list_and_revoke(connect: Connect, app: App) -> None:
    gw = app.gateway
    async with connect(gw.address, app.account.key) as client:
        made = await call(client, TOOL, action="create", app=app.name, name=" CI ")
        url = made["hook"]["url"]
        gw.confidential.add(url.rpartition("/")[2])
        assert made["hook"]["name"] == "CI"
        assert "shown only once" in made["note"]
        assert (await gw.http.post(url)).status_code == 409

        (hook,) = (await call(client, TOOL, action="list"))["hooks"]
        assert hook.keys() == {"id", "name", "app", "createdAt", "lastUsedAt"}
        assert hook["lastUsedAt"] is not None

        # Agents fill in arguments that they do not need with empty values.
        revoked = await call(client, TOOL, action="revoke", id=hook["id"], app="", name=None)
        assert revoked["revoked"] == hook["id"]
        assert (await gw.http.post(url)).status_code == 404
        assert (await call(client, TOOL, action="list", id=None)) == {"hooks": []}


async def test_accounts_do_not_see_each_other(app: App, backend: FakeAppBackend) -> None:
    gw = app.gateway
    other = await gw.app(backend)
    async with (
        over_http()(gw.address, app.account.key) as ours,
        over_http()(gw.address, other.account.key) as theirs,
    ):
        made = await call(ours, TOOL, action="create", app=app.name, name="CI")
        gw.confidential.add(made["hook"]["url"].rpartition("/")[2])
        assert await call(theirs, TOOL, action="list") == {"hooks": []}
        assert "no such hook" in await refused(theirs, TOOL, action="revoke", id=made["hook"]["id"])
        assert "no such app" in await refused(theirs, TOOL, action="create", app=app.name, name="CI")
        await call(ours, TOOL, action="revoke", id=made["hook"]["id"])
