"""`capsule members`, against a running gateway."""

import pytest

from tests.support.command_line import Tool

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_members(capsule: Tool) -> None:
    for email, role in (("ada@example.com", "owner"), ("Bob@example.com", "viewer")):
        made = (await capsule("members", "set", email, role)).line
        assert made == f"{email} is now a member with the role '{role}'."
    headings, *rows = (await capsule("members", "list")).rows
    assert headings == ["EMAIL", "ROLE", "SINCE"]
    assert [row[:2] for row in rows] == [["ada@example.com", "owner"], ["bob@example.com", "viewer"]]
    assert "LAST_OWNER" in await capsule.refused("members", "remove", "ada@example.com")
    assert (await capsule("members", "remove", "bob@example.com", "--json")).json == {"removed": "bob@example.com"}
    assert "REQUEST_MALFORMED" in await capsule.refused("members", "set", "nobody", "viewer")
