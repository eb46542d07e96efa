"""The members of accounts: people with a role, by e-mail address.

- `{pNN}:members:<account>` has the members and their roles, and decides who is one
- `memberships:<sha256>` has the accounts of an address. It is written before the members, and removed after, so it may
  name an account too many, but after an interruption never too few. Who adds a member writes it again afterwards, and
  who removes one checks afterwards whether the address has become a member meanwhile

Addresses are in lower case. Each request of a session reads the members from this process's copy, which follows a
change within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from gateway.accounts.access import Role
from gateway.accounts.api_keys import digest
from gateway.accounts.record_cache import RecordCache
from gateway.accounts.records import Account, require_present
from gateway.errors import LastOwner, NotFound, RequestMalformed
from gateway.ids import Time, now_iso
from gateway.keys import account_key, members_key, memberships_key
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change, change_record
from gateway.validation import is_email

MAX_MEMBERS = 100  # of one account
MAX_ACCOUNTS = 50  # of one address


class Member(msgspec.Struct, frozen=True):
    role: Role
    since: Time


class _Members(msgspec.Struct, frozen=True):
    """The record of an account."""

    members: dict[str, Member]  # by address

    def require_owner_without(self, email: str) -> None:
        """Raises LastOwner if this is the address of the only owner."""
        if [address for address, member in self.members.items() if member.role == "owner"] == [email]:
            raise LastOwner


class MemberView(msgspec.Struct):
    email: str
    role: Role
    since: Time


class Membership(NamedTuple):
    account: Account
    role: Role


def read_email(text: str) -> str:
    """Returns the address as it is compared: in lower case. Raises RequestMalformed."""
    if not is_email(text):
        raise RequestMalformed("email: must be an address such as ada@example.com, in ASCII.")
    return text.lower()


class Members:
    def __init__(self, store: Store, cache: RecordCache) -> None:
        self._store, self._cache = store, cache

    async def list_members(self, account_id: str) -> list[MemberView]:
        """Returns the members, by address."""
        members = await self._read(account_id)
        return [MemberView(email, each.role, each.since) for email, each in sorted(members.items())]

    async def find_role(self, account_id: str, email: str) -> Role | None:
        member = (await self._read(account_id)).get(email)
        return None if member is None else member.role

    async def list_accounts(self, email: str) -> list[Membership]:
        """Returns the accounts of an address, by name."""
        found = []
        for account_id in (await self._store.get(memberships_key(digest(email))) or "").split():
            account = await self._cache.read(account_key(account_id), Account)
            role = await self.find_role(account_id, email)
            if role is not None and account is not None and not account.is_gone:
                found.append(Membership(account, role))
        return sorted(found, key=lambda each: (each.account.name, each.account.id))

    async def put(self, account_id: str, email: str, role: Role) -> MemberView:
        """Adds a member, or changes the role.

        Raises LastOwner, RequestMalformed beyond a limit, and NotFound if the account is gone.
        """

        def change(record: _Members) -> _Members:
            present = record.members.get(email)
            if present is not None and role != "owner":
                record.require_owner_without(email)
            if present is None and len(record.members) >= MAX_MEMBERS:
                raise RequestMalformed(f"An account has at most {MAX_MEMBERS} members; remove one first.")
            return _Members({**record.members, email: Member(role, present.since if present else now_iso())})

        await self._change_accounts(email, account_id, add=True)
        try:
            record = await self._change(account_id, change)
        except RequestMalformed:
            await self._unlist_account(email, account_id)
            raise
        await self._change_accounts(email, account_id, add=True)
        try:
            await require_present(self._store, account_id)
        except NotFound:
            await self.remove_all(account_id)
            raise
        member = record.members[email]
        return MemberView(email, member.role, member.since)

    async def remove(self, account_id: str, email: str) -> bool:
        """Removes a member. Returns whether there was one. Can be repeated after an interruption. Raises LastOwner."""
        found = False

        def change(record: _Members) -> _Members:
            nonlocal found
            found = email in record.members
            record.require_owner_without(email)
            return _Members({address: member for address, member in record.members.items() if address != email})

        await self._change(account_id, change)
        await self._unlist_account(email, account_id)
        return found

    async def remove_all(self, account_id: str) -> None:
        """Removes all members of an account that is being deleted."""
        for email in await self._read_now(account_id):
            await self._change_accounts(email, account_id, add=False)
        await self._change(account_id, lambda _: _Members({}))

    async def list_again(self, account_id: str) -> None:
        """Lists the account with each of its addresses. A backup may have an address's accounts from before."""
        for email in await self._read_now(account_id):
            await self._change_accounts(email, account_id, add=True)

    async def _read(self, account_id: str) -> dict[str, Member]:
        record = await self._cache.read(members_key(account_id), _Members)
        return {} if record is None else record.members

    async def _read_now(self, account_id: str) -> dict[str, Member]:
        """Reads the members from Redis, without the cache."""
        text = await self._store.get(members_key(account_id))
        return msgspec.json.decode(text, type=_Members).members if text else {}

    async def _change(self, account_id: str, change: Callable[[_Members], _Members]) -> _Members:
        key = members_key(account_id)

        async def compute(present: str) -> Change[_Members]:
            changed = change(msgspec.json.decode(present, type=_Members) if present else _Members({}))
            return Change(msgspec.json.encode(changed).decode() if changed.members else "", changed)

        changed = await change_record(self._store, key, compute, subject="the members")
        self._cache.forget(key)
        return changed

    async def _unlist_account(self, email: str, account_id: str) -> None:
        """Removes the account from those of the address, unless the address belongs to it by now."""
        await self._change_accounts(email, account_id, add=False)
        if email in await self._read_now(account_id):
            await self._change_accounts(email, account_id, add=True)

    async def _change_accounts(self, email: str, account_id: str, *, add: bool) -> None:
        async def compute(present: str) -> Change[None]:
            others = [each for each in present.split() if each != account_id]
            if add and len(others) >= MAX_ACCOUNTS:
                raise RequestMalformed(f"email: the address belongs to {MAX_ACCOUNTS} accounts already.")
            return Change(" ".join([*others, account_id] if add else others), None)

        await change_record(self._store, memberships_key(digest(email)), compute, subject="the memberships")
