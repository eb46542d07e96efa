"""The agent tool `service_members` with the SDK's own client."""

import pytest

from tests.support.agents import call, over_http, refused
from tests.support.gateway_process import Gateway
from tests.support.visitor import Visitor

TOOL, EMAIL = "service_members", "ada@example.com"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_list_invite_and_remove(gw: Gateway) -> None:
    account, visitor = await gw.account(), Visitor(gw)
    async with over_http()(gw.address, account.key) as client, visitor.http:
        invited = await call(client, TOOL, action="invite", email="Ada@example.com", role="developer")
        assert (invited["member"]["email"], invited["member"]["state"]) == (EMAIL, "invited")
        assert "accept" in invited["note"]
        await visitor.join(account, EMAIL, "viewer")
        changed = await call(client, TOOL, action="invite", email=EMAIL, role="owner")
        assert (changed["member"]["role"], changed["member"]["state"]) == ("owner", "member")
        assert (await call(client, TOOL, action="list"))["members"] == [changed["member"]]
        assert "LAST_OWNER" in await refused(client, TOOL, action="remove", email=EMAIL)
        await call(client, TOOL, action="invite", email="bob@example.com", role="viewer")
        assert await call(client, TOOL, action="remove", email="Bob@example.com") == {"removed": "bob@example.com"}
    trail = [(each["action"], each["target"]) for each in (await account.get("/account/audit")).json()]
    assert trail[:2] == [("remove_member", "Bob@example.com"), ("set_member", "bob@example.com")]
