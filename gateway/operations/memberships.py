"""Invites people to an account, changes their roles and removes them, with their notices and sessions."""

from gateway.accounts.access import Access, Role
from gateway.accounts.api_keys import KeyReference
from gateway.accounts.members import MemberView, read_email
from gateway.accounts.records import Account
from gateway.accounts.registry import Registry
from gateway.accounts.session_store import SessionStore
from gateway.errors import NotFound, Unauthorized
from gateway.events.notices import Notices
from gateway.settings import Settings

API_KEY = "API key"  # who invited somebody, if it was not a person


class Memberships:
    def __init__(self, settings: Settings, registry: Registry, sessions: SessionStore, notices: Notices) -> None:
        self._settings, self._members, self._api_keys = settings, registry.members, registry.api_keys
        self._sessions, self._notices = sessions, notices

    async def place(self, access: Access, email: str, role: Role) -> MemberView:
        """Changes the role of a member or of an invitation, or else invites the address, by e-mail too if it is set up.

        Raises RequestMalformed, LastOwner, InvitationLimitReached, AppSuspended for an invitation, and Unauthorized if
        the key that invites has been revoked meanwhile.
        """
        account, address, by = access.account, read_email(email), access.email or API_KEY
        key_id, may_invite = access.key_id or None, account.suspension is None
        placed = await self._members.set_role(account.id, address, role, by, key_id=key_id, may_invite=may_invite)
        if key_id is not None and await self._api_keys.find(KeyReference(account.id, key_id)) is None:
            await self._members.withdraw_from_key(account.id, key_id)
            raise Unauthorized
        if placed.invitation is not None and self._settings.sends_notices:
            await self._notices.queue_invitation(account, placed.invitation)
        return placed.view

    async def end(self, account: Account, email: str) -> None:
        """Removes a member, or cancels an invitation. A refusal ends nothing.

        Raises LastOwner, NotFound, and RequestMalformed for what is no address.
        """
        address = email.lower()  # a member whose address is not accepted any more can be removed
        if not await self._members.remove(account.id, address):
            read_email(email)
            raise NotFound("This address belongs to no member of this account, and is not invited.")
        await self._notices.end(account.id, address)
        await self._sessions.close_membership(address, account.id)
