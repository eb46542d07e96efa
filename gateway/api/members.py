"""The account API: the members of the account and their roles, and whom it has invited."""

import msgspec
from litestar import delete, get, put
from litestar.params import FromPath, JSONBody
from litestar.types import ControllerRouterHandler

from gateway.accounts.access import Access, Role
from gateway.accounts.members import MemberView, read_email
from gateway.accounts.records import Account
from gateway.accounts.registry import Registry
from gateway.accounts.session_store import SessionStore
from gateway.accounts.sessions import Sessions
from gateway.api.authentication import account_router
from gateway.api.resources import Caller, CallerAccess
from gateway.errors import AppSuspended, InvitationLimitReached, LastOwner, NotFound, RequestMalformed
from gateway.events.notices import Notices
from gateway.services import Injected
from gateway.settings import Settings

API_KEY = "API key"  # who invited somebody, if it was not a person


class MemberRole(msgspec.Struct, forbid_unknown_fields=True):
    role: Role


@get("/members")
async def list_members(account: Caller, registry: Injected[Registry]) -> list[MemberView]:
    """List the members of the account, and who is invited."""
    return await registry.members.list_members(account.id)


# The address may contain a slash, which must get 400 and not 404.
@put("/members/{email:path}", errors=[RequestMalformed, LastOwner, InvitationLimitReached, AppSuspended])
async def set_member(
    access: CallerAccess,
    email: FromPath[str],
    data: JSONBody[MemberRole],
    registry: Injected[Registry],
    notices: Injected[Notices],
    settings: Injected[Settings],
) -> MemberView:
    """Invite somebody, or change the role of a member or of an invitation.

    An address that is no member is invited, for 14 days. Whoever signs in with it, verified by the provider, sees the
    invitation, and becomes a member by accepting it. An account has at most 50 open invitations. An `owner` may do
    everything. A `developer` may not change keys, members, limits or the deletion of anything but hooks, variables and
    data. A `viewer` reads.
    """
    address = read_email(email.removeprefix("/"))
    return await place_member(access, address, data.role, registry, notices, settings)


@delete("/members/{email:path}", errors=[RequestMalformed, NotFound, LastOwner])
async def remove_member(
    account: Caller,
    email: FromPath[str],
    registry: Injected[Registry],
    sessions: Injected[Sessions],
    notices: Injected[Notices],
) -> None:
    """Remove a member, or cancel an invitation.

    Whoever signed in may remove themselves, whatever their role. The last owner cannot be removed. The member's
    sessions for this account end at once, and they get no more notices of it.
    """
    await end_membership(account, email.removeprefix("/"), registry, sessions, notices)


# -- for the agent tool too ------------------------------------------------------------------------------------


async def place_member(
    access: Access, address: str, role: Role, registry: Registry, notices: Notices, settings: Settings
) -> MemberView:
    """Changes the role of a member or of an invitation, or else invites the address, by e-mail too if that is set up.

    Raises RequestMalformed, LastOwner, InvitationLimitReached, and AppSuspended for an invitation.
    """
    account = access.account
    placed = await registry.members.set_role(
        account.id, address, role, access.email or API_KEY, may_invite=account.suspension is None
    )
    if placed.invitation is not None and settings.sends_notices:
        await notices.queue_invitation(account, placed.invitation)
    return placed.view


async def end_membership(
    account: Account, email: str, registry: Registry, sessions: SessionStore, notices: Notices
) -> None:
    """Removes a member, or cancels an invitation. A refusal ends nothing.

    Raises LastOwner, NotFound, and RequestMalformed for what is no address.
    """
    address = email.lower()  # a member whose address is not accepted any more can be removed
    if not await registry.members.remove(account.id, address):
        read_email(email)
        raise NotFound("This address belongs to no member of this account, and is not invited.")
    await notices.end(account.id, address)
    await sessions.close_membership(address, account.id)


ROUTES: list[ControllerRouterHandler] = [account_router(list_members, set_member, remove_member)]
