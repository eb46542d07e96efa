"""The agent tool `service_members`: lists the members of the account, invites people, and removes members."""

from typing import Annotated, get_args

from gateway.accounts.access import Role
from gateway.mcp.tools import AgentTool, Arg, Result

Email = Annotated[str, Arg("the person's e-mail address")]
RoleName = Annotated[
    Role,
    Arg(
        "owner (everything), developer (all but keys, members, limits and deletions) or viewer (reads)",
        enum=[*get_args(Role)],
    ),
]


class MembersTool(AgentTool):
    """List the account's members and open invitations, invite people, change roles, or remove members.

    A member may do with the account what their role includes: ask the user before you invite or remove anybody.
    """

    name, title = "service_members", "Members"

    async def list(self) -> Result:
        """List the members, and who is invited."""
        return {"members": await self.services.registry.members.list_members(self.account.id)}

    async def invite(self, email: Email, role: RoleName) -> Result:
        """Invite the person with the address `email`, or change the `role` of a member or of an invitation."""
        member = await self.services.memberships.place(self.access, email, role)
        waits = member.state == "invited"
        note = "They become a member when they sign in and accept." if waits else "They are a member."
        return {"member": member, "note": note}

    async def remove(self, email: Email) -> Result:
        """Remove the member with the address `email`, or cancel their invitation."""
        await self.services.memberships.end(self.account, email)
        return {"removed": email.lower()}
