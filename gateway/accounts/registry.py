"""Accounts and apps: their records in Redis, and this process's copies of them.

A copy is used only while the subscription to changes is alive, and is dropped when its record changes, so that every
process feels a change at once. When the subscription is lost, or silent for a second, each look-up reads Redis until it
is back. Only while a record's node of a cluster is away, its copy is used for another minute: nobody can
change the record meanwhile, and an app whose account is on another node is served.

Other parts subscribe to records of their own. A record that cannot be read, because its node of a cluster is away, is
read again until it can be, and concerns nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec
import structlog

from gateway.accounts import scripts
from gateway.accounts.api_keys import FIRST, ApiKeys
from gateway.accounts.keys import account_apps_key, account_key, accounts_key, alias_key, app_key, apps_key, domain_key
from gateway.accounts.records import SLUG, Account, App, AppLimits, read_app
from gateway.accounts.vault import Vault
from gateway.cancellation import end_if_canceled
from gateway.errors import BackboneUnavailable, NotFound, RegistrationsClosed, RequestMalformed
from gateway.ids import new_id, now_iso
from gateway.monitors.keys import certificate_ends_key, certificates_key, monitored_keys, probes_key, unhealthy_key
from gateway.redis.client import ATTEMPT, Store
from gateway.redis.faults import code_of
from gateway.redis.partitions import partition_tag
from gateway.redis.scripts import CHANGES_CHANNEL, compare_and_set
from gateway.settings import Plan

logger = structlog.get_logger()

COPIES = 20_000  # records
MAX_AGE = 300.0  # seconds after which a copy is read again, in case a cluster lost a message
KEPT = 60.0  # seconds that a copy serves while its record cannot be read
RETRY = 1.0  # seconds between two attempts to read it
HEARTBEAT = 0.3  # seconds between checks that the subscription still answers
REREAD = 30.0  # seconds after which subscribers read their records again, for the same reason
RELOAD_PAUSE = 0.3  # seconds before a record that could not be read is read again

LIMITS_ATTEMPTS = 50  # to change limits that others change at the same time
CONTENDED = "The app is being changed from several places at once; try again."
CLAIM_SECONDS = 60.0  # after which a claim to a domain must be in its app's record

R = TypeVar("R")


class _Copy(msgspec.Struct):
    record: Any
    current_until: float  # monotonic seconds
    kept_until: float  # if the record cannot be read
    away: bool = False  # it could not be read


class _Subscriber(msgspec.Struct):
    reload: Callable[[], Awaitable[None]]
    doubt: Callable[[], None] | None
    current: bool = False  # it has read its record at least once


def verified_domain(app: App) -> str:
    return app.customDomain if app.customDomain and app.customDomainVerified else ""


class Registry:
    def __init__(self, store: Store, vault: Vault) -> None:
        self.store, self.vault = store, vault
        self.api_keys = ApiKeys(store)
        self.live = False  # the subscription answers, so copies may be used
        self._copies: dict[str, _Copy] = {}
        self._changes = 0
        self._subscribed = False
        self._subscribers: dict[str, _Subscriber] = {}
        self._outdated: dict[str, bool] = {}  # subscribers' records to read; True: because a change was announced
        self._reload_wanted = asyncio.Event()

    # -- reading ---------------------------------------------------------------------------------------------

    async def app(self, name: str) -> App | None:
        return await self._read(app_key(name), App)

    async def account(self, account_id: str) -> Account | None:
        return await self._read(account_key(account_id), Account)

    async def account_of(self, app: App) -> Account | None:
        return await self._read(app.account_key, Account)

    async def _read(self, key: str, kind: type[R]) -> R | None:
        copy, now = self._copies.get(key), time.monotonic()
        if copy is not None and copy.current_until > now:
            return cast(R, copy.record)
        if copy is not None and copy.away and copy.kept_until > now:
            copy.current_until = now + RETRY  # one reads, and nobody waits with it
        before = self._changes
        try:
            text = await self.store.get(key)
        except BackboneUnavailable:
            if copy is None or copy is not self._copies.get(key) or copy.kept_until <= now or not self.store.cluster:
                raise
            copy.away, copy.current_until = True, now + RETRY
            return cast(R, copy.record)
        if text is None:
            self._copies.pop(key, None)
            return None  # not cached: names that do not exist must not push out those that do
        record = cast(R, read_app(text)) if kind is App else msgspec.json.decode(text, type=kind)
        # A change announced during the read may concern what was read.
        if before == self._changes:
            self._copies.pop(key, None)
            while len(self._copies) >= COPIES:
                del self._copies[next(iter(self._copies))]
            age = MAX_AGE if self.live else 0.0
            self._copies[key] = _Copy(record, now + age, now + age + KEPT)
        return record

    async def find(self, app: str) -> App | None:
        """Finds an app by the id it was created under, or by its name."""
        if not SLUG.fullmatch(app):
            return None
        names = await self._names(app)
        if names and (renamed := await self.app(names[0])) is not None and renamed.id == app:
            return renamed
        return await self.app(app)

    async def _names(self, app_id: str) -> list[str]:
        """The present name of a renamed app, then former names that it still has to give up."""
        return (await self.store.get(alias_key(app_id)) or "").split()

    async def by_ids(self, app_ids: Sequence[str]) -> dict[str, tuple[App, Account]]:
        """Reads many apps with their accounts together, without the copies; leaves out those that do not exist."""
        aliases = await self.store.get_all([alias_key(app_id) for app_id in app_ids])
        names = [(alias or app_id).split()[0] for app_id, alias in zip(app_ids, aliases, strict=True)]
        records = await self.store.get_all([app_key(name) for name in names])
        apps = [read_app(record) for record in records if record is not None]
        account_ids = sorted({app.account for app in apps})
        texts = await self.store.get_all([account_key(account_id) for account_id in account_ids])
        accounts = {
            account_id: msgspec.json.decode(text, type=Account)
            for account_id, text in zip(account_ids, texts, strict=True)
            if text is not None
        }
        wanted = set(app_ids)
        return {app.id: (app, accounts[app.account]) for app in apps if app.id in wanted and app.account in accounts}

    async def apps_of(self, account_id: str) -> list[App]:
        names = await self.store.client.smembers(account_apps_key(account_id))
        apps = [await self.app(name) for name in sorted(names)]
        # The set holds a name from before its record is written until after the record is removed.
        return [app for app in apps if app is not None and app.account == account_id]

    # -- writing ---------------------------------------------------------------------------------------------

    async def create_account(self, name: str, plan: Plan) -> tuple[Account, str]:
        """Creates an account; returns it with its API key, which cannot be read again later."""
        account = Account(id=new_id("acc"), name=name, plan=plan, createdAt=now_iso())
        # first: whatever is interrupted, no account is missing in the list
        await self.store.client.zadd(accounts_key(partition_tag(account.id)), {account.id: 0})
        await self._write(account_key(account.id), account)
        _, api_key = await self.api_keys.create(account.id, FIRST)
        return account, api_key

    async def register(self, name: str, per_day: int) -> tuple[Account, str]:
        """Creates a free account. Raises RegistrationsClosed when today's registrations are used up."""
        registration = await scripts.register(self.store, per_day)
        if not registration.accepted:
            raise RegistrationsClosed(retry_after=registration.resets_in)
        return await self.create_account(name, "free")

    async def change_plan(self, account_id: str, plan: Plan) -> Account:
        account = await self.account(account_id)
        if account is None:
            raise NotFound
        account = msgspec.structs.replace(account, plan=plan)
        await self._write(account_key(account_id), account)
        return account

    async def put_app(self, app: App, before: App | None) -> None:
        """Writes an app; may be repeated after an interruption.

        Raises RequestMalformed when the name or the domain is taken.
        """
        await self._take_domain(app)
        await self.store.client.sadd(account_apps_key(app.account), app.name)
        try:
            await self._take_name(app, before)
        except RequestMalformed:
            await self._remove_from_account(app)
            if before is None or verified_domain(before) != verified_domain(app):
                await self._give_up_domain(app)
            raise
        await self._give_up_former_names(app, before)
        if before is not None and verified_domain(before) != verified_domain(app):
            await self._give_up_domain(before)
        if before is not None and before.account != app.account:
            await self._remove_from_account(before)
            await self._withdraw_from_monitors(before)
        await self._enroll_with_monitors(app)

    async def _take_name(self, app: App, before: App | None) -> None:
        """Claims the name by compare-and-set, so that of two apps that want it at once, one gets it.

        The limits that the account holder set are read again, because they may have changed since `before` was read.
        """
        key = app_key(app.name)
        for _ in range(10):
            present = await self.store.get(key)
            former = present if before is None else present or await self.store.get(app_key(before.name))
            limits = None
            if former is not None:
                found = read_app(former)
                if found.id != app.id:
                    raise RequestMalformed("name: another app has this name.")
                limits = found.limits if found.account == app.account else None
            record = msgspec.json.encode(msgspec.structs.replace(app, limits=limits)).decode()
            if await compare_and_set(self.store, key, record, expected=present or ""):
                return self._forget(key)
        raise BackboneUnavailable(CONTENDED)

    async def change_app(self, app: App, change: Callable[[App], App], attempts: int = 10) -> App:
        """Changes the record by compare-and-set, so that of changes at once that name different fields each holds.

        Raises NotFound if the app was deleted, renamed or moved since it was read.
        """
        key = app_key(app.name)
        for _ in range(attempts):
            present = await self.store.get(key)
            record = None if present is None else read_app(present)
            if present is None or record is None or (record.id, record.account) != (app.id, app.account):
                raise NotFound
            changed = change(record)
            if await compare_and_set(self.store, key, msgspec.json.encode(changed).decode(), expected=present):
                self._forget(key)
                return changed
        raise BackboneUnavailable(CONTENDED)

    async def change_limits(self, app: App, change: Callable[[AppLimits], AppLimits]) -> AppLimits:
        """As `change_app`, for the limits that the account holder sets."""

        def apply(record: App) -> App:
            limits = change(record.limits or AppLimits())
            return msgspec.structs.replace(record, limits=None if limits == AppLimits() else limits)

        return (await self.change_app(app, apply, LIMITS_ATTEMPTS)).limits or AppLimits()

    async def _take_domain(self, app: App) -> None:
        """Claims a verified custom domain, so that of two apps with the same domain, one is served there.

        A claim that its app's record does not confirm is ignored once the claim is old: a put writes the claim first.
        """
        if not (domain := verified_domain(app)):
            return
        key = domain_key(domain)
        for _ in range(10):
            present = await self.store.get(key) or ""
            owner_id, _, since = present.partition(" ")
            if owner_id not in ("", app.id):
                owner = await self.find(owner_id)
                confirmed = owner is not None and owner.id == owner_id and verified_domain(owner) == domain
                if confirmed or time.time() - float(since) < CLAIM_SECONDS:
                    raise RequestMalformed("customDomain: another app has this domain.")
            if await compare_and_set(self.store, key, f"{app.id} {time.time():.0f}", expected=present):
                return
        raise BackboneUnavailable("The domain is being claimed from several places at once; try again.")

    async def _give_up_domain(self, app: App) -> None:
        if domain := verified_domain(app):
            present = await self.store.get(domain_key(domain)) or ""
            if present.partition(" ")[0] == app.id:
                await compare_and_set(self.store, domain_key(domain), "", expected=present)

    async def claim_domain(self, app: App) -> bool:
        """Whether the app is the one to serve at its custom domain. Records older than the claims make theirs here."""
        domain = verified_domain(app)
        claim = await self.store.get(domain_key(domain)) or "" if domain else ""
        if claim.partition(" ")[0] != app.id:
            try:
                await self._take_domain(app)
            except RequestMalformed:
                return False
        return bool(domain)

    async def _give_up_former_names(self, app: App, before: App | None) -> None:
        # The alias lists them first, so that the next put finishes a rename that was interrupted.
        names = await self._names(app.id)
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

    async def _enroll_with_monitors(self, app: App) -> None:
        """Comes last in `put_app`: a monitor that finds no app behind an id removes the id."""
        tag = partition_tag(app.account)
        await self.store.client.zadd(apps_key(tag), {app.id: 0})
        await self.store.client.zadd(probes_key(tag), {app.id: 0}, nx=True)
        # The domain may be a new one: its certificate is due now.
        await self.store.client.zadd(certificates_key(tag), {app.id: 0})

    async def _withdraw_from_monitors(self, app: App) -> None:
        tag = partition_tag(app.account)
        listed = [apps_key(tag), probes_key(tag), certificates_key(tag)]
        listed += [unhealthy_key(tag), certificate_ends_key(tag)]
        for zset in listed:
            await self.store.client.zrem(zset, app.id)
        await self.store.client.delete(*monitored_keys(tag, app.id))

    async def delete_app(self, app: App) -> None:
        """May be repeated after an interruption. Raises NotFound if the app now belongs to another account."""
        other = await self._remove_record(app)
        await self._remove(alias_key(app.id))
        await self._give_up_domain(app)
        if other is None or other.account != app.account:
            await self._remove_from_account(app)
        await self._withdraw_from_monitors(app)

    async def _remove_record(self, app: App) -> App | None:
        """Returns the app that has the name instead, if it was deleted before and its name has been taken since."""
        key = app_key(app.name)
        for _ in range(10):
            present = await self.store.get(key)
            record = None if present is None else read_app(present)
            if record is None or record.id != app.id:
                return record
            if record.account != app.account:
                raise NotFound
            if await compare_and_set(self.store, key, "", expected=present):
                self._forget(key)
                return None
        raise BackboneUnavailable(CONTENDED)

    async def _remove(self, key: str) -> None:
        await compare_and_set(self.store, key, "")
        self._forget(key)

    async def _write(self, key: str, record: msgspec.Struct) -> None:
        await compare_and_set(self.store, key, msgspec.json.encode(record).decode())
        self._forget(key)  # this process does not wait for its own message

    # -- staying current -------------------------------------------------------------------------------------

    def subscribe(
        self, key: str, reload: Callable[[], Awaitable[None]], doubt: Callable[[], None] | None = None
    ) -> None:
        """Runs `reload` when the record changes, and each time the subscription begins.

        Runs `doubt` when a change was announced and cannot be read.
        """
        self._subscribers[key] = _Subscriber(reload, doubt)

    def _forget(self, key: str) -> None:
        self._changes += 1
        self._copies.pop(key, None)

    def _doubt_all(self) -> None:
        self.live = self._subscribed = False
        self._changes += 1
        now = time.monotonic()
        for copy in self._copies.values():
            if copy.current_until > now and not copy.away:
                copy.current_until, copy.kept_until = 0.0, now + KEPT

    async def follow_changes(self) -> None:
        """Runs as long as the process."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_repeatedly())
            group.create_task(self._reload_repeatedly())

    async def _follow_repeatedly(self) -> None:
        pause = 0.05
        while True:
            end_if_canceled()
            try:
                async with self.store.subscription(CHANGES_CHANNEL) as subscription:
                    await self._follow(subscription)
            except BackboneUnavailable as error:
                if self.live:
                    logger.warning("registry.lost", error=code_of(error.__cause__))
                    pause = 0.05
            finally:
                self._doubt_all()
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def _follow(self, subscription: Any) -> None:
        unanswered = 0
        while True:
            async with asyncio.timeout(ATTEMPT):
                message = await subscription.get_message(timeout=HEARTBEAT)
            if message is not None:
                unanswered = 0
                self._apply(message)
                continue
            if unanswered == 2:
                raise TimeoutError("the subscription does not answer")
            unanswered += 1
            async with asyncio.timeout(ATTEMPT):
                await subscription.ping()

    def _apply(self, message: dict[str, Any]) -> None:
        if message["type"] == "subscribe":
            # Whatever was read before may have changed without this process hearing of it.
            self._changes += 1
            self._subscribed = True
            self._outdated = dict.fromkeys(self._subscribers, False) | self._outdated
            self._update_live()
            self._reload_wanted.set()
        elif message["type"] == "message":
            key = message["data"]
            self._forget(key)
            if key in self._subscribers:
                self._outdated[key] = True
                self._reload_wanted.set()

    def _update_live(self) -> None:
        self.live = self._subscribed and all(each.current for each in self._subscribers.values())

    async def _reload_repeatedly(self) -> None:
        while True:
            end_if_canceled()
            try:
                async with asyncio.timeout(REREAD):
                    await self._reload_wanted.wait()
            except TimeoutError:
                self._outdated = dict.fromkeys(self._subscribers, False) | self._outdated
            self._reload_wanted.clear()
            for key, announced in list(self._outdated.items()):
                del self._outdated[key]
                await self._reload(key, announced)
            if self._outdated:
                await asyncio.sleep(RELOAD_PAUSE)
                self._reload_wanted.set()

    async def _reload(self, key: str, announced: bool) -> None:
        subscriber = self._subscribers[key]
        try:
            await subscriber.reload()
        except BackboneUnavailable:
            self._outdated.setdefault(key, announced)
            if announced and subscriber.doubt is not None:
                subscriber.doubt()
        else:
            subscriber.current = True
            self._update_live()
