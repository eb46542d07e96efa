"""`capsule members`, against a running gateway."""

import datetime

import pytest

from tests.support.accounts import Account
from tests.support.command_line import Tool
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_members(capsule: Tool, account: Account) -> None:
    ends = f"{datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=14):%Y-%m-%d}"
    for email, role in (("ada@example.com", "viewer"), ("ada@example.com", "owner"), ("Bob@example.com", "viewer")):
        made = (await capsule("members", "set", email, role)).line
        assert made == f"{email.lower()} is invited with the role '{role}' until {ends}."
    visitor = Visitor(account.gateway)
    async with visitor.http:
        await visitor.join(account, "ada@example.com", "owner")
    assert (await capsule("members", "set", "ada@example.com", "owner")).line == (
        "ada@example.com is a member with the role 'owner'."
    )
    headings, *rows = (await capsule("members", "list")).rows
    assert headings == ["EMAIL", "ROLE", "STATE", "SINCE", "ENDS"]
    assert [row[:3] for row in rows] == [
        ["ada@example.com", "owner", "member"],
        ["bob@example.com", "viewer", "invited"],
    ]
    assert ends in rows[1]
    assert [each["state"] for each in (await capsule("members", "list", "--json")).json] == ["member", "invited"]
    assert "LAST_OWNER" in await capsule.refused("members", "remove", "ada@example.com")
    assert (await capsule("members", "remove", "bob@example.com", "--json")).json == {"removed": "bob@example.com"}
    assert "NOT_FOUND" in await capsule.refused("members", "remove", "bob@example.com")
    for email in ("nobody", "a/b@example.com"):
        assert "REQUEST_MALFORMED" in await capsule.refused("members", "set", email, "viewer")
