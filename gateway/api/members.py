"""The account API: the members of the account and their roles."""

import msgspec
from litestar import delete, get, put
from litestar.params import FromPath, JSONBody
from litestar.types import ControllerRouterHandler

from gateway.accounts.access import Role
from gateway.accounts.members import MemberView, read_email
from gateway.accounts.registry import Registry
from gateway.accounts.sessions import Sessions
from gateway.api.authentication import account_router
from gateway.api.resources import Caller
from gateway.errors import LastOwner, NotFound, RequestMalformed
from gateway.events.notices import Notices
from gateway.services import Injected


class MemberRole(msgspec.Struct, forbid_unknown_fields=True):
    role: Role


@get("/members")
async def list_members(account: Caller, registry: Injected[Registry]) -> list[MemberView]:
    """List the members of the account."""
    return await registry.members.list_members(account.id)


@put("/members/{email:str}", errors=[RequestMalformed, LastOwner])
async def set_member(
    account: Caller, email: FromPath[str], data: JSONBody[MemberRole], registry: Injected[Registry]
) -> MemberView:
    """Add a member, or change a member's role.

    Whoever signs in with this e-mail address, verified by the provider, then belongs to the account. An `owner` may do
    everything. A `developer` may not change keys, members, limits or the deletion of anything but hooks, variables and
    data. A `viewer` reads.
    """
    return await registry.members.put(account.id, read_email(email), data.role)


@delete("/members/{email:str}", errors=[RequestMalformed, NotFound, LastOwner])
async def remove_member(
    account: Caller,
    email: FromPath[str],
    registry: Injected[Registry],
    sessions: Injected[Sessions],
    notices: Injected[Notices],
) -> None:
    """Remove a member.

    Whoever signed in may remove themselves, whatever their role. The last owner cannot be removed. The member's
    sessions for this account end at once, and they get no more notices of it.
    """
    address = read_email(email)
    found = await registry.members.remove(account.id, address)
    await notices.end(account.id, address)
    await sessions.close_membership(address, account.id)
    if not found:
        raise NotFound("This address belongs to no member of this account.")


ROUTES: list[ControllerRouterHandler] = [account_router(list_members, set_member, remove_member)]
