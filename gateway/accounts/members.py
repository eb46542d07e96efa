"""The members of accounts: people with a role, by e-mail address, and those who are invited.

Nobody becomes a member without saying yes, except the first owner of an account. An account invites an address, and
whoever signs in with it accepts or declines.

- `{pNN}:members:<account>` has the members and their roles, and decides who is one
- `{pNN}:invitations:<account>` has the open invitations, and decides who is invited. Both records change in one step,
  so an invitation that was canceled makes nobody a member
- `memberships:<sha256>` has the accounts of an address. It is written before the members, and removed after, so it may
  name an account too many, but after an interruption never too few. Who adds a member writes it again afterwards, and
  who removes one checks afterwards whether the address has become a member meanwhile
- `invited-by:<sha256>` has the accounts that invited an address, by the end of the invitation. It only finds them

Invitations count for the account that makes them. Whoever is invited by strangers, however often, can still become a
member of any account, and create one.

Addresses are in lower case. Each request of a session reads the members from this process's copy, which follows a
change within a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from gateway.accounts.access import Role
from gateway.accounts.api_keys import digest
from gateway.accounts.record_cache import RecordCache
from gateway.accounts.records import Account, require_present
from gateway.errors import AppSuspended, InvitationLimitReached, LastOwner, NotFound, RequestMalformed
from gateway.ids import Time, now_iso, seconds_of
from gateway.keys import account_key, invitations_key, invited_by_key, members_key, memberships_key
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change, change_record
from gateway.redis.scripts import Companion
from gateway.validation import is_email

MAX_MEMBERS = 100  # of one account
MAX_ACCOUNTS = 50  # of one address
MAX_INVITATIONS = 50  # open ones, of one account
INVITATION_SECONDS = 14 * 86_400
MAX_INVITED_BY = 1_000  # accounts that are found for one address; the newest
SHOWN_INVITATIONS = 50  # of one address; the newest

State = Literal["member", "invited"]


class Member(msgspec.Struct, frozen=True):
    role: Role
    since: Time


class Invitation(msgspec.Struct, frozen=True, omit_defaults=True):
    email: str
    role: Role
    by: str  # the e-mail address of the member who invited, or "API key"
    at: Time
    endsAt: Time
    keyId: str | None = None  # of the API key that invited, or has changed the role; records from before have none

    @property
    def ends(self) -> float:
        """Seconds since the epoch."""
        return seconds_of(self.endsAt)


Invitations = dict[str, Invitation]  # by the hash of the address


class _Members(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of an account, and beside it the record of its invitations."""

    members: dict[str, Member]  # by address
    invitations: Invitations = {}

    def require_owner_without(self, email: str) -> None:
        """Raises LastOwner if this is the address of the only owner."""
        if [address for address, member in self.members.items() if member.role == "owner"] == [email]:
            raise LastOwner

    def require_room(self) -> None:
        """Raises RequestMalformed if the account cannot have another member."""
        if len(self.members) >= MAX_MEMBERS:
            raise RequestMalformed(f"An account has at most {MAX_MEMBERS} members; remove one first.")

    def put_member(self, email: str, role: Role) -> _Members:
        """Returns the record with the member, who is not invited any more. Raises LastOwner and RequestMalformed."""
        present = self.members.get(email)
        if present is None:
            self.require_room()
        elif role != "owner":
            self.require_owner_without(email)
        member = Member(role, present.since if present else now_iso())
        changed = _Members({**self.members, email: member}, self.invitations)
        # The invitations that somebody has made end when they are no owner any more.
        return changed.keep(lambda each: each.email != email and (role == "owner" or each.by != email))

    def put_invitation(self, invitation: Invitation) -> _Members:
        """Raises InvitationLimitReached, and RequestMalformed if the account cannot have another member."""
        self.require_room()
        if len(self.invitations) >= MAX_INVITATIONS:
            raise InvitationLimitReached
        return _Members(self.members, {**self.invitations, digest(invitation.email): invitation})

    def find_invitation(self, email: str) -> Invitation | None:
        return self.invitations.get(digest(email))

    def keep(self, wanted: Callable[[Invitation], bool]) -> _Members:
        """Returns the record with the invitations that are wanted."""
        return _Members(self.members, {hashed: each for hashed, each in self.invitations.items() if wanted(each)})


class MemberView(msgspec.Struct):
    email: str
    role: Role
    since: Time  # of an invitation: when it was made
    state: State = "member"
    endsAt: Time | None = None  # of an invitation


class AccountChoice(msgspec.Struct):
    """An account of a person, who can tell it from another one of the same name by its id and its first owner."""

    id: str
    name: str
    role: Role
    owner: str | None  # e-mail address of the owner who has been a member longest


class Membership(NamedTuple):
    account: Account
    role: Role
    owner: str | None

    @property
    def choice(self) -> AccountChoice:
        return AccountChoice(self.account.id, self.account.name, self.role, self.owner)


class InvitationView(msgspec.Struct):
    """An invitation, as the person who is invited sees it."""

    account: str
    name: str  # of the account
    by: str
    role: Role
    at: Time
    endsAt: Time


class Placement(NamedTuple):
    """What became of an address whose role an account has set."""

    view: MemberView
    invitation: Invitation | None  # a new one


def read_email(text: str) -> str:
    """Returns the address as it is compared: in lower case. Raises RequestMalformed."""
    if not is_email(text):
        raise RequestMalformed("email: must be an address such as ada@example.com, in ASCII, without / ? and #.")
    return text.lower()


class Members:
    def __init__(
        self,
        store: Store,
        cache: RecordCache,
        *,
        invitation_seconds: int = INVITATION_SECONDS,
        max_invited_by: int = MAX_INVITED_BY,
    ) -> None:
        self._store, self._cache = store, cache
        self._invitation_seconds, self._max_invited_by = invitation_seconds, max_invited_by

    # -- members ---------------------------------------------------------------------------------------------

    async def list_members(self, account_id: str) -> list[MemberView]:
        """Returns the members and those who are invited, by address."""
        members = await self._read(account_id)
        views = [MemberView(email, each.role, each.since) for email, each in members.items()]
        views += map(_view_invitation, (await self._read_invitations(account_id)).values())
        return sorted(views, key=lambda each: each.email)

    async def find_role(self, account_id: str, email: str) -> Role | None:
        member = (await self._read(account_id)).get(email)
        return None if member is None else member.role

    async def belongs(self, account_id: str, email: str) -> bool:
        """Returns whether the address is that of a member. Reads Redis, and not this process's copy."""
        return email in await self._read_now(account_id)

    async def list_accounts(self, email: str) -> list[Membership]:
        """Returns the accounts of an address, by name."""
        found = []
        for account_id in (await self._store.get(memberships_key(digest(email))) or "").split():
            account = await self._cache.read(account_key(account_id), Account)
            members = await self._read(account_id)
            if email in members and account is not None and not account.is_gone:
                found.append(Membership(account, members[email].role, _find_first_owner(members)))
        return sorted(found, key=lambda each: (each.account.name, each.account.id))

    async def set_role(
        self, account_id: str, email: str, role: Role, by: str, *, key_id: str | None = None, may_invite: bool = True
    ) -> Placement:
        """Changes the role of a member or of an invitation, or else invites the address.

        `key_id` is that of the API key that does this, or None for a member.

        Raises LastOwner and InvitationLimitReached, RequestMalformed if the account cannot have another member,
        AppSuspended if it may not invite, and NotFound if it is gone.
        """
        new = None

        def change(record: _Members) -> _Members:
            nonlocal new
            new, present = None, record.find_invitation(email)
            if email in record.members:
                return record.put_member(email, role)
            if present is not None:
                changed = msgspec.structs.replace(present, role=role, keyId=key_id or present.keyId)
                return _Members(record.members, {**record.invitations, digest(email): changed})
            if not may_invite:
                raise AppSuspended("The account is suspended, and invites nobody until an operator ends that.")
            now = time.time()
            new = Invitation(email, role, by, now_iso(now), now_iso(now + self._invitation_seconds), key_id)
            return record.put_invitation(new)

        record = await self._change(account_id, change)
        invitation = record.find_invitation(email)
        if invitation is not None:
            await self._list_invitation(account_id, invitation)
        await self._require_account(account_id)
        if invitation is None:
            return Placement(MemberView(email, role, record.members[email].since), None)
        return Placement(_view_invitation(invitation), new)

    async def put(self, account_id: str, email: str, role: Role) -> MemberView:
        """Makes the address a member at once, or changes the role. For the first owner of an account.

        Raises LastOwner, RequestMalformed beyond a limit, and NotFound if the account is gone.
        """
        member = await self._add(account_id, email, lambda record: record.put_member(email, role))
        return MemberView(email, member.role, member.since)

    async def remove(self, account_id: str, email: str) -> bool:
        """Removes a member, or cancels an invitation. Returns whether there was one. Raises LastOwner.

        Can be repeated after an interruption.
        """
        found = False

        def change(record: _Members) -> _Members:
            nonlocal found
            found = email in record.members or record.find_invitation(email) is not None
            record.require_owner_without(email)
            others = {address: member for address, member in record.members.items() if address != email}
            return _Members(others, record.invitations).keep(lambda each: email not in (each.email, each.by))

        await self._change(account_id, change)
        await self._unlist_account(email, account_id)
        await self._unlist_invitation(email, account_id)
        return found

    async def withdraw_from_key(self, account_id: str, key_id: str) -> None:
        """Cancels the invitations that a revoked API key has made or changed. Can be repeated."""
        if any(each.keyId == key_id for each in (await self._read_invitations(account_id)).values()):
            await self._change(account_id, lambda record: record.keep(lambda each: each.keyId != key_id))

    async def remove_all(self, account_id: str) -> None:
        """Removes all members and invitations of an account that is being deleted."""
        for email in await self._read_now(account_id):
            await self._change_accounts(email, account_id, add=False)
        for hashed in await self._read_invitations(account_id):
            await self._store.client.zrem(invited_by_key(hashed), account_id)
        await self._change(account_id, lambda _: _Members({}))

    async def list_again(self, account_id: str) -> None:
        """Lists the account with each of its addresses. A backup may have an address's accounts from before."""
        for email in await self._read_now(account_id):
            await self._change_accounts(email, account_id, add=True)
        for invitation in (await self._read_invitations(account_id)).values():
            await self._list_invitation(account_id, invitation)

    # -- invitations -----------------------------------------------------------------------------------------

    async def list_invitations(self, email: str) -> list[InvitationView]:
        """Returns the newest open invitations of an address, newest first."""
        accounts = await self._store.client.zrevrange(invited_by_key(digest(email)), 0, SHOWN_INVITATIONS - 1)
        records = await self._store.get_all([invitations_key(account_id) for account_id in accounts])
        found = []
        for account_id, text in zip(accounts, records, strict=True):
            invitation = _decode_invitations(text).get(digest(email))
            account = await self._cache.read(account_key(account_id), Account)
            if invitation is not None and account is not None and account.deletion is None:
                each = invitation
                found.append(InvitationView(account_id, account.name, each.by, each.role, each.at, each.endsAt))
        return found

    async def require_invitation(self, account_id: str, email: str) -> Invitation:
        """Returns the open invitation of the address to the account. Raises NotFound."""
        invitation = (await self._read_invitations(account_id)).get(digest(email))
        if invitation is None:
            raise NotFound("There is no such invitation; it may have ended.")
        return invitation

    async def accept(self, account_id: str, email: str) -> None:
        """Makes a person who is invited a member. Raises NotFound, and RequestMalformed beyond a limit."""

        def change(record: _Members) -> _Members:
            invitation = record.find_invitation(email)
            if invitation is None:
                raise NotFound("There is no such invitation; it may have ended.")
            return record.put_member(email, invitation.role)

        await self._add(account_id, email, change)
        await self._unlist_invitation(email, account_id)

    async def decline(self, account_id: str, email: str) -> None:
        """Removes the invitation of a person, who stays a member if they are one. Can be repeated."""
        await self._change(account_id, lambda record: record.keep(lambda each: each.email != email))
        await self._unlist_invitation(email, account_id)

    # -- the records -----------------------------------------------------------------------------------------

    async def _read(self, account_id: str) -> dict[str, Member]:
        record = await self._cache.read(members_key(account_id), _Members)
        return {} if record is None else record.members

    async def _read_now(self, account_id: str) -> dict[str, Member]:
        """Reads the members from Redis, without the cache."""
        text = await self._store.get(members_key(account_id))
        return msgspec.json.decode(text, type=_Members).members if text else {}

    async def _read_invitations(self, account_id: str) -> Invitations:
        return _decode_invitations(await self._store.get(invitations_key(account_id)))

    async def _add(self, account_id: str, email: str, change: Callable[[_Members], _Members]) -> Member:
        """Makes a change after which the address is a member. Raises RequestMalformed, and what `change` raises."""
        await self._change_accounts(email, account_id, add=True)
        try:
            record = await self._change(account_id, change)
        except (NotFound, RequestMalformed):
            await self._unlist_account(email, account_id)
            raise
        await self._change_accounts(email, account_id, add=True)
        if email not in await self._read_now(account_id):  # removed meanwhile
            await self._unlist_account(email, account_id)
        await self._require_account(account_id)
        return record.members[email]

    async def _require_account(self, account_id: str) -> None:
        """Undoes a change if the account is gone. Raises NotFound.

        Who deletes an account looks for its members after its record is gone. One of the two finds them.
        """
        try:
            await require_present(self._store, account_id)
        except NotFound:
            await self.remove_all(account_id)
            raise

    async def _change(self, account_id: str, change: Callable[[_Members], _Members]) -> _Members:
        async def compute(present: str) -> Change[_Members]:
            invitations = await self._store.get(invitations_key(account_id))
            members = msgspec.json.decode(present, type=_Members).members if present else {}
            changed = change(_Members(members, _decode_invitations(invitations)))
            text = msgspec.json.encode(_Members(changed.members)).decode() if changed.members else ""
            return Change(text, changed, _write_invitations(account_id, changed.invitations, invitations or ""))

        return await self._cache.change(members_key(account_id), compute, "the members")

    # -- the accounts of an address --------------------------------------------------------------------------

    async def _unlist_account(self, email: str, account_id: str) -> None:
        """Removes the account from those of the address, unless the address belongs to it by now."""
        await self._change_accounts(email, account_id, add=False)
        if email in await self._read_now(account_id):
            await self._change_accounts(email, account_id, add=True)

    async def _change_accounts(self, email: str, account_id: str, *, add: bool) -> None:
        async def compute(present: str) -> Change[None]:
            others = [each for each in present.split() if each != account_id]
            if add and len(others) >= MAX_ACCOUNTS:
                raise RequestMalformed(
                    f"The address belongs to {MAX_ACCOUNTS} accounts already; leave one of them first."
                )
            return Change(" ".join([*others, account_id] if add else others), None)

        await change_record(self._store, memberships_key(digest(email)), compute, subject="the memberships")

    async def _list_invitation(self, account_id: str, invitation: Invitation) -> None:
        key = invited_by_key(digest(invitation.email))
        async with self._store.client.pipeline(transaction=True) as pipe:
            pipe.zadd(key, {account_id: int(invitation.ends * 1000)})
            pipe.zremrangebyscore(key, "-inf", int(time.time() * 1000))
            pipe.zremrangebyrank(key, 0, -self._max_invited_by - 1)
            pipe.expire(key, self._invitation_seconds)
            await pipe.execute()

    async def _unlist_invitation(self, email: str, account_id: str) -> None:
        """Removes the account from those that invited the address, unless it has invited the address again by now."""
        await self._store.client.zrem(invited_by_key(digest(email)), account_id)
        again = (await self._read_invitations(account_id)).get(digest(email))
        if again is not None:
            await self._list_invitation(account_id, again)


def _decode_invitations(text: str | None) -> Invitations:
    """Returns the open invitations of a record."""
    invitations, now = msgspec.json.decode(text, type=Invitations) if text else {}, time.time()
    return {hashed: each for hashed, each in invitations.items() if each.ends > now}


def _write_invitations(account_id: str, invitations: Invitations, expected: str) -> Companion:
    """Returns what writes the record in the same step as that of the members. It expires with the last invitation."""
    text = msgspec.json.encode(invitations).decode() if invitations else ""
    end = max((each.ends for each in invitations.values()), default=0.0)
    return Companion(invitations_key(account_id), text, max(1, math.ceil(end - time.time())), expected)


def _view_invitation(invitation: Invitation) -> MemberView:
    return MemberView(invitation.email, invitation.role, invitation.at, "invited", invitation.endsAt)


def _find_first_owner(members: dict[str, Member]) -> str | None:
    owners = [(member.since, email) for email, member in members.items() if member.role == "owner"]
    return min(owners)[1] if owners else None
