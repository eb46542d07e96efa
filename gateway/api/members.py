"""The account API: the members of the account and their roles, and whom it has invited."""

import msgspec
from litestar import delete, get, put
from litestar.params import FromPath, JSONBody
from litestar.types import ControllerRouterHandler

from gateway.accounts.access import Role
from gateway.accounts.members import MemberView
from gateway.accounts.registry import Registry
from gateway.api.authentication import account_router
from gateway.api.resources import Caller, CallerAccess
from gateway.errors import AppSuspended, InvitationLimitReached, LastOwner, NotFound, RequestMalformed
from gateway.operations.memberships import Memberships
from gateway.services import Injected


class MemberRole(msgspec.Struct, forbid_unknown_fields=True):
    role: Role


@get("/members")
async def list_members(account: Caller, registry: Injected[Registry]) -> list[MemberView]:
    """List the members of the account, and who is invited."""
    return await registry.members.list_members(account.id)


# The address may contain a slash, which must get 400 and not 404.
@put("/members/{email:path}", errors=[RequestMalformed, LastOwner, InvitationLimitReached, AppSuspended])
async def set_member(
    access: CallerAccess, email: FromPath[str], data: JSONBody[MemberRole], memberships: Injected[Memberships]
) -> MemberView:
    """Invite somebody, or change the role of a member or of an invitation.

    An address that is no member is invited, for 14 days. Whoever signs in with it, verified by the provider, sees the
    invitation, and becomes a member by accepting it. An account has at most 50 open invitations. An `owner` may do
    everything. A `developer` may not change keys, members, limits or the deletion of anything but hooks, variables and
    data. A `viewer` reads.
    """
    return await memberships.place(access, email.removeprefix("/"), data.role)


@delete("/members/{email:path}", errors=[RequestMalformed, NotFound, LastOwner])
async def remove_member(account: Caller, email: FromPath[str], memberships: Injected[Memberships]) -> None:
    """Remove a member, or cancel an invitation.

    Whoever signed in may remove themselves, whatever their role. The last owner cannot be removed. The member's
    sessions for this account end at once, and they get no more notices of it.
    """
    await memberships.end(account, email.removeprefix("/"))


ROUTES: list[ControllerRouterHandler] = [account_router(list_members, set_member, remove_member)]
