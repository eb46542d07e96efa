"""The records of accounts and apps: reads, creates, renames, moves and deletes them.

A put writes several keys, in an order that allows an interrupted put to be repeated. Meanwhile other processes find
either the old app or the new one.
"""

from collections.abc import Callable, Sequence

import msgspec

from gateway.accounts import scripts
from gateway.accounts.api_keys import FIRST_NAME, ApiKeys, ListedKey, digest
from gateway.accounts.domain_claims import DomainClaims
from gateway.accounts.members import Members
from gateway.accounts.record_cache import RecordCache
from gateway.accounts.records import (
    SLUG,
    Account,
    App,
    AppLimits,
    Domain,
    replace_domains,
    require_present,
)
from gateway.accounts.suspended import list_suspended, unlist_suspended
from gateway.accounts.vault import Vault
from gateway.errors import NameTaken, NotFound, RegistrationsClosed, SignInFailed
from gateway.ids import new_id, now_iso
from gateway.keys import (
    account_apps_key,
    account_key,
    accounts_key,
    alias_key,
    app_key,
    apps_key,
    certificate_ends_key,
    certificates_key,
    domain_checks_key,
    first_sign_in_key,
    monitored_keys,
    partition_tag,
    probes_key,
    unhealthy_key,
)
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change
from gateway.redis.scripts import compare_and_set
from gateway.settings import Plan

ANONYMOUS_CLOSED = "Today's registrations without a sign-in are used up; sign in, or try again after 00:00 UTC."
FIRST_SIGN_IN_SECONDS = 10  # in which one process creates the account of a person


async def enroll_app(store: Store, app: App) -> None:
    """Comes after the app's record is written: a monitor that finds no app for an id removes the id."""
    tag = partition_tag(app.account)
    await store.client.zadd(apps_key(tag), {app.id: 0})
    await store.client.zadd(probes_key(tag), {app.id: 0}, nx=True)
    await store.client.zadd(domain_checks_key(tag), {app.id: 0}, nx=True)
    # A domain may be a new one: its certificate is due now.
    await store.client.zadd(certificates_key(tag), {app.id: 0})
    if app.suspension is not None:  # it may come from another account
        await list_suspended(store, app.account, app.id)


async def withdraw_app(store: Store, app: App) -> None:
    """Removes the app from the lists, and the monitors' records of it."""
    tag = partition_tag(app.account)
    listed = [apps_key(tag), probes_key(tag), certificates_key(tag), domain_checks_key(tag)]
    listed += [unhealthy_key(tag), certificate_ends_key(tag)]
    for zset in listed:
        await store.client.zrem(zset, app.id)
    await store.client.delete(*monitored_keys(tag, app.id))
    if app.suspension is not None:
        await unlist_suspended(store, app.account, app.id)


class Registry:
    def __init__(self, store: Store, vault: Vault) -> None:
        self.store, self.vault = store, vault
        self.cache = RecordCache(store)
        self.api_keys = ApiKeys(store)
        self.members = Members(store, self.cache)
        self.domains = DomainClaims(store, self.find_app)

    # -- reading ---------------------------------------------------------------------------------------------

    async def app(self, name: str) -> App | None:
        return await self.cache.read(app_key(name), App)

    async def account(self, account_id: str) -> Account | None:
        return await self.cache.read(account_key(account_id), Account)

    async def account_of(self, app: App) -> Account | None:
        return await self.cache.read(app.account_key, Account)

    async def find_app(self, app: str) -> App | None:
        """Finds an app by the id under which it was created, or by its name."""
        if not SLUG.fullmatch(app):
            return None
        names = await self._read_names(app)
        if names and (renamed := await self.app(names[0])) is not None and renamed.id == app:
            return renamed
        return await self.app(app)

    async def _read_names(self, app_id: str) -> list[str]:
        """Returns the present name of a renamed app, then former names that are not removed yet."""
        return (await self.store.get(alias_key(app_id)) or "").split()

    def may_have_changed(self, app: App, account: Account) -> bool:
        """Returns whether one of the records may have changed since this process read it. Does not read Redis."""
        return self.cache.find(app_key(app.name), App) is not app or (
            self.cache.find(app.account_key, Account) is not account
        )

    async def read_apps(self, app_ids: Sequence[str]) -> dict[str, tuple[App, Account]]:
        """Reads many apps with their accounts together, without the cache; leaves out those that do not exist."""
        aliases = await self.store.get_all([alias_key(app_id) for app_id in app_ids])
        names = [(alias or app_id).split()[0] for app_id, alias in zip(app_ids, aliases, strict=True)]
        records = await self.store.get_all([app_key(name) for name in names])
        apps = [_decode_app(record) for record in records if record is not None]
        account_ids = sorted({app.account for app in apps})
        texts = await self.store.get_all([account_key(account_id) for account_id in account_ids])
        accounts = {
            account_id: msgspec.json.decode(text, type=Account)
            for account_id, text in zip(account_ids, texts, strict=True)
            if text is not None
        }
        wanted = set(app_ids)
        return {app.id: (app, accounts[app.account]) for app in apps if app.id in wanted and app.account in accounts}

    async def read_intact_apps(self, app_ids: Sequence[str]) -> tuple[dict[str, tuple[App, Account]], dict[str, str]]:
        """Like `read_apps`, but a damaged record affects no other app. Returns also what is wrong with such, by app."""
        try:
            return await self.read_apps(app_ids), {}
        except msgspec.DecodeError as error:
            if len(app_ids) == 1:
                return {}, {app_ids[0]: str(error)}
        found: dict[str, tuple[App, Account]] = {}
        damaged: dict[str, str] = {}
        half = len(app_ids) // 2
        for part in (app_ids[:half], app_ids[half:]):
            intact, faults = await self.read_intact_apps(part)
            found |= intact
            damaged |= faults
        return found, damaged

    async def list_keys(self, account_id: str) -> list[ListedKey]:
        """Returns the account's API keys, newest first, each with the present name of its app."""

        async def find_name(app_id: str) -> str | None:
            app = await self.find_app(app_id)
            return app.name if app is not None and app.account == account_id else None

        return await self.api_keys.list(account_id, find_name)

    async def revoke_key(self, account_id: str, key_id: str, *, even_last: bool = False) -> None:
        """Revokes the key with its sessions, and cancels the invitations that it has made.

        Raises NotFound, and without `even_last` LastKey for the account's only key with full access.
        """
        try:
            await self.api_keys.revoke(account_id, key_id, even_last=even_last)
        except NotFound:  # perhaps an earlier call was interrupted after the key was revoked
            await self.members.withdraw_from_key(account_id, key_id)
            raise
        await self.members.withdraw_from_key(account_id, key_id)

    async def list_apps(self, account_id: str) -> list[App]:
        """Returns the account's apps, by name."""
        names = await self.store.client.smembers(account_apps_key(account_id))
        apps = [await self.app(name) for name in sorted(names)]
        # The set holds a name from before its record is written until after the record is removed.
        return [app for app in apps if app is not None and app.account == account_id]

    # -- accounts --------------------------------------------------------------------------------------------

    async def create_account(self, name: str, plan: Plan) -> tuple[Account, str]:
        """Creates an account; returns it with its API key, which cannot be read again later."""
        account = await self._add_account(name, plan)
        return account, (await self.api_keys.create(account.id, FIRST_NAME)).key

    async def _add_account(self, name: str, plan: Plan) -> Account:
        account = Account(id=new_id("acc"), name=name, plan=plan, createdAt=now_iso())
        # The list first: whatever is interrupted, no account is missing in it.
        await self.store.client.zadd(accounts_key(partition_tag(account.id)), {account.id: 0})
        await self._write(account_key(account.id), account)
        return account

    async def register_account(self, name: str, per_day: int, anonymous: int) -> tuple[Account, str]:
        """Creates a free account for somebody who has not signed in; at most `anonymous` of a day's are.

        Raises RegistrationsClosed when today's registrations are used up.
        """
        await self._count_registration(per_day, anonymous)
        return await self.create_account(name, "free")

    async def register_person(self, email: str, per_day: int) -> Account:
        """Creates a free account whose owner is the person with this address. It has no API key.

        Raises RegistrationsClosed, and SignInFailed while another process creates it.
        """
        mark = first_sign_in_key(digest(email))
        if not await self.store.client.set(mark, "1", nx=True, ex=FIRST_SIGN_IN_SECONDS):
            raise SignInFailed("Another sign-in of yours has just begun; sign in again in a few seconds.")
        try:
            await self._count_registration(per_day)
        except RegistrationsClosed:
            await self.store.client.delete(mark)
            raise
        account = await self._add_account(email, "free")
        await self.members.put(account.id, email, "owner")
        return account

    async def _count_registration(self, per_day: int, anonymous: int | None = None) -> None:
        registration = await scripts.count_registration(self.store, per_day, anonymous)
        if registration.verdict != "counted":
            message = ANONYMOUS_CLOSED if registration.verdict == "anonymous full" else None
            raise RegistrationsClosed(message, retry_after=registration.resets_in)

    async def change_account(self, account_id: str, change: Callable[[Account], Account]) -> tuple[Account, Account]:
        """Changes the record by compare-and-set. Returns it as it was before and after. Raises NotFound."""

        async def compute(present: str) -> Change[tuple[Account, Account]]:
            if not present:
                raise NotFound("There is no such account.")
            before = msgspec.json.decode(present, type=Account)
            after = change(before)
            return Change(msgspec.json.encode(after).decode(), (before, after))

        return await self.cache.change(account_key(account_id), compute, "the account")

    async def remove_account(self, account_id: str) -> None:
        """Removes the record; nothing else."""
        await self._remove(account_key(account_id))

    # -- apps ------------------------------------------------------------------------------------------------

    async def put_app(self, app: App, before: App | None) -> App:
        """Writes an app, and returns its record. Can be repeated after an interruption.

        Raises NameTaken when another app has the name or a domain, and NotFound if the account is gone.
        """
        former = set() if before is None else {*before.verified_domains}
        for domain in app.verified_domains:
            await self.domains.claim(app, domain)
        await self.store.client.sadd(account_apps_key(app.account), app.name)
        try:
            app = await self._take_name(app, before)
        except NameTaken:
            await self._remove_from_account(app)
            await self.domains.release(app, {*app.verified_domains} - former)
            raise
        await self._remove_former_names(app, before)
        await self.domains.release(app, former - {*app.verified_domains})
        if before is not None and before.account != app.account:
            await self._remove_from_account(before)
            await withdraw_app(self.store, before)
        await enroll_app(self.store, app)
        # Who deletes the account looks for its apps after its record is gone. One of the two finds this app.
        try:
            await require_present(self.store, app.account)
        except NotFound:
            await self.delete_app(app)
            raise
        return app

    async def _take_name(self, app: App, before: App | None) -> App:
        """Writes the record by compare-and-set, so that of two apps with the same new name, one gets it.

        The account holder's limits and a suspension are read again, because they may have changed since `before` was
        read. Returns the record with them.
        """

        async def compute(present: str) -> Change[App]:
            former = present if present or before is None else await self.store.get(app_key(before.name))
            limits = suspension = None
            if former:
                found = _decode_app(former)
                if found.id != app.id:
                    raise NameTaken
                limits = found.limits if found.account == app.account else None
                suspension = found.suspension
            record = msgspec.structs.replace(app, limits=limits, suspension=suspension)
            return Change(msgspec.json.encode(record).decode(), record)

        return await self.cache.change(app_key(app.name), compute, "the app")

    async def change_app(self, app: App, change: Callable[[App], App]) -> App:
        """Changes the record by compare-and-set, so that concurrent changes of different fields are all made.

        Raises NotFound if the app was deleted, renamed or moved since it was read.
        """

        async def compute(present: str) -> Change[App]:
            record = _decode_app(present) if present else None
            if record is None or (record.id, record.account) != (app.id, app.account):
                raise NotFound
            changed = change(record)
            return Change(msgspec.json.encode(changed).decode(), changed)

        return await self.cache.change(app_key(app.name), compute, "the app")

    async def change_domains(self, app: App, change: Callable[[Sequence[Domain]], Sequence[Domain]]) -> App:
        """Like `change_app`, for the custom domains. Releases the claims to those that are no longer verified."""
        former: set[str] = set()

        def apply(record: App) -> App:
            nonlocal former
            former = {*record.verified_domains}
            return replace_domains(record, change(record.domains))

        changed = await self.change_app(app, apply)
        if former != (verified := {*changed.verified_domains}):
            await self.domains.release(changed, former - verified)
            await enroll_app(self.store, changed)
        return changed

    async def change_limits(self, app: App, change: Callable[[AppLimits], AppLimits]) -> AppLimits:
        """Like `change_app`, for the limits that the account holder sets."""

        def apply(record: App) -> App:
            limits = change(record.limits or AppLimits())
            return msgspec.structs.replace(record, limits=None if limits == AppLimits() else limits)

        return (await self.change_app(app, apply)).limits or AppLimits()

    async def _remove_former_names(self, app: App, before: App | None) -> None:
        # The alias lists them first, so that the next put finishes a rename that was interrupted.
        names = await self._read_names(app.id)
        former = {app.id, *names, before.name if before else app.name} - {app.name}
        if former or names:
            await compare_and_set(self.store, alias_key(app.id), " ".join([app.name, *sorted(former)]))
        for name in former:
            old = await self.app(name)
            if old is not None and old.id == app.id:
                await self._remove(app_key(name))
                await self._remove_from_account(old)
        if app.id != app.name or names:
            await compare_and_set(self.store, alias_key(app.id), "" if app.id == app.name else app.name)

    async def _remove_from_account(self, app: App) -> None:
        await self.store.client.srem(account_apps_key(app.account), app.name)

    async def delete_app(self, app: App) -> None:
        """Deletes an app; can be repeated after an interruption. Raises NotFound if another account now has the app."""
        other = await self._remove_record(app)
        await self._remove(alias_key(app.id))
        await self.domains.release(app, app.verified_domains)
        if other is None or other.account != app.account:
            await self._remove_from_account(app)
        await withdraw_app(self.store, app)

    async def _remove_record(self, app: App) -> App | None:
        """Returns the app that now has the name, if this one was deleted before and its name was taken since."""

        async def compute(present: str) -> Change[App | None]:
            record = _decode_app(present) if present else None
            if record is None or record.id != app.id:
                return Change(None, record)
            if record.account != app.account:
                raise NotFound
            return Change("", None)

        return await self.cache.change(app_key(app.name), compute, "the app")

    async def _remove(self, key: str) -> None:
        await compare_and_set(self.store, key, "")
        self.cache.forget(key)

    async def _write(self, key: str, record: msgspec.Struct) -> None:
        await compare_and_set(self.store, key, msgspec.json.encode(record).decode())
        self.cache.forget(key)


def _decode_app(text: str) -> App:
    return msgspec.json.decode(text, type=App)
