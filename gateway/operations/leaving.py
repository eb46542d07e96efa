"""Deletes accounts: begins the grace, ends it early, and removes everything that is left of an account.

During the grace, the account's record has `deletion`, and everything of the account is stopped as by a suspension.
`{pNN}:deletions` has the accounts by the end of their grace. A worker then removes them:

1. It marks the record, after which nobody can keep the account, revokes the keys, and removes the members, with the
   sessions of both.
2. While a reservation or a command to a host remains, it waits, and tries again.
3. It removes the apps, and their objects in the storage. `{pNN}:leaving:<account>` remembers the ids and names.
4. It keeps the spend by day, and removes all other keys and entries that name the account. The record comes last.

Each step can be repeated. A worker that begins postpones the account in the list; if it dies, another one repeats the
removal then. So does every failure.
"""

import time
from collections.abc import AsyncIterator, Set

import msgspec
import structlog

from gateway.accounts.api_keys import KeyReference
from gateway.accounts.records import Account, Deletion, replace_deletion
from gateway.accounts.registry import Registry
from gateway.accounts.session_store import SessionStore
from gateway.accounts.suspended import list_suspended, unlist_suspended
from gateway.data.commands import DataCommands
from gateway.data.records import FOLDER, DataRecords, DeletedData, snapshot_key
from gateway.deploys.hooks import Hook
from gateway.deploys.records import MAX_LISTED, DeployRecords
from gateway.deploys.states import Deploys
from gateway.errors import NotFound, ServiceError
from gateway.events.notices import STREAM as MAILS
from gateway.ids import day_of, now_iso, seconds_of
from gateway.keys import (
    BUILD_QUEUE_KEYS,
    PARTITION_TAGS,
    account_key,
    accounts_key,
    answer_key,
    answers_of_provider_key,
    app_window_key,
    audit_key,
    dead_letters_key,
    deleted_data_key,
    deletions_key,
    deploy_key,
    deploy_log_key,
    failed_accounts_key,
    failed_deploys_key,
    former_name_key,
    former_names_key,
    hook_key,
    hooks_key,
    key_set_keys,
    lease_keys,
    leaving_key,
    partition_tag,
    reservation_keys,
    spend_key,
    spend_of_deleted_key,
    spenders_key,
    stored_key,
    stream_key,
    usage_key,
    user_window_key,
)
from gateway.operations.removal import Removal
from gateway.redis.client import Store
from gateway.settings import Settings
from gateway.storage import Storage

logger = structlog.get_logger()

DAY_SECONDS = 86_400
SPEND_DAYS = 400  # that the spend of a deleted account is kept
RETRY_MS, WAIT_MS = 60_000, 5_000  # after a failure; while something has not ended, and before a deletion at once
ACCOUNTS_AT_A_TIME = 10  # of one partition
PAGE = 1_000  # entries of a stream
CANCELED = "the account is being deleted"


class Leaving:
    def __init__(
        self,
        registry: Registry,
        deploys: Deploys,
        deploy_records: DeployRecords,
        removal: Removal,
        storage: Storage,
        data_records: DataRecords,
        data_commands: DataCommands,
        settings: Settings,
    ) -> None:
        self._registry, self._store = registry, registry.store
        self._sessions = SessionStore(registry.store)
        self._deploys, self._deploy_records = deploys, deploy_records
        self._removal, self._storage = removal, storage
        self._data_records, self._data_commands = data_records, data_commands
        self._grace_days = settings.account_grace
        self._providers = [each.name for each in settings.providers]

    # -- the grace -------------------------------------------------------------------------------------------

    async def begin(self, account_id: str, *, now: bool = False) -> str:
        """Begins the grace, or without one (`now`) the deletion. Returns the time of the deletion. Can be repeated.

        Raises NotFound.
        """
        if await self._registry.account(account_id) is None:
            raise NotFound("There is no such account.")
        at, tag = time.time(), partition_tag(account_id)
        deletion = Deletion(now_iso(at), now_iso(at if now else at + self._grace_days * DAY_SECONDS))

        def change(record: Account) -> Account:
            present = record.deletion
            earlier = present is not None and present.deletesAt <= deletion.deletesAt
            return record if earlier else replace_deletion(record, deletion)

        # The lists first: an account in them whose record has no deletion is not deleted.
        due = max(round(seconds_of(deletion.deletesAt) * 1000), int(at * 1000) + WAIT_MS)
        await self._store.client.zadd(deletions_key(tag), {account_id: due}, lt=True)
        await list_suspended(self._store, account_id)
        _, account = await self._registry.change_account(account_id, change)
        await self._deploys.cancel_unfinished(account_id, None, CANCELED)
        return account.deletion.deletesAt if account.deletion else deletion.deletesAt

    async def cancel(self, account_id: str) -> None:
        """Keeps the account, as it was. Raises NotFound if it is not being deleted, or if it is too late."""

        def change(record: Account) -> Account:
            if record.deletion is None:
                raise NotFound("This account is not being deleted.")
            if record.deletion.begun:
                raise NotFound("It is too late to keep this account.")
            return replace_deletion(record, None)

        _, account = await self._registry.change_account(account_id, change)
        await self._store.client.zrem(deletions_key(partition_tag(account_id)), account_id)
        if account.operators_suspension is None:
            await unlist_suspended(self._store, account_id)

    # -- the deletion ----------------------------------------------------------------------------------------

    async def delete_due(self) -> int:
        """Deletes the accounts whose grace has ended. Returns their number. Raises BackboneUnavailable."""
        deleted = 0
        for account_id in await list_due(self._store):
            try:
                deleted += await self._delete(account_id)
            except ServiceError as error:
                logger.warning("account.not_deleted", account=account_id, error=error.code)
        return deleted

    async def _delete(self, account_id: str) -> bool:
        """Returns whether nothing of the account is left."""
        tag = partition_tag(account_id)
        await self._postpone(account_id, RETRY_MS)
        if not await self._mark(account_id):
            await self._store.client.zrem(deletions_key(tag), account_id)
            return False
        await self._revoke_keys(account_id)
        for member in await self._registry.members.list_members(account_id):
            await self._sessions.close_membership(member.email, account_id)
        await self._registry.members.remove_all(account_id)
        if await self._has_reservations(account_id):
            await self._postpone(account_id, WAIT_MS)
            return False
        words = await self._remove_apps(account_id)
        await self._remove_deleted_data(account_id)
        if await self._data_commands.has_unfinished(account_id):
            await self._postpone(account_id, WAIT_MS)  # a host still has files, and makes a last snapshot
            return False
        await self._remove_deploys(account_id)
        await self._keep_spend(account_id)
        await self._remove_entries(account_id, words)
        if await self._remove_keys(account_id, words):
            await self._postpone(account_id, WAIT_MS)  # what was in progress, such as a delivery, may write once more
            return False
        await self._registry.remove_account(account_id)
        await self._remove_latecomers(account_id)
        await unlist_suspended(self._store, account_id)
        await self._store.client.zrem(accounts_key(tag), account_id)
        await self._store.client.zrem(deletions_key(tag), account_id)
        logger.info("account.deleted", account=account_id)
        return True

    async def _remove_latecomers(self, account_id: str) -> None:
        """Removes what a request has written that found the account's record just before it was removed."""
        await self._revoke_keys(account_id)
        await self._registry.members.remove_all(account_id)
        await self._remove_keys(account_id, await self._remove_apps(account_id))

    async def _postpone(self, account_id: str, milliseconds: int) -> None:
        due = {account_id: int(time.time() * 1000) + milliseconds}
        await self._store.client.zadd(deletions_key(partition_tag(account_id)), due, xx=True)

    async def _mark(self, account_id: str) -> bool:
        """Returns False if the account is kept. One whose record is gone is removed to the end."""

        def change(record: Account) -> Account:
            if record.deletion is None:
                return record
            return replace_deletion(record, msgspec.structs.replace(record.deletion, begun=True))

        if await self._store.get(account_key(account_id)) is None:
            return True
        _, account = await self._registry.change_account(account_id, change)
        return account.deletion is not None

    async def _revoke_keys(self, account_id: str) -> None:
        for key in await self._registry.api_keys.list_records(account_id):
            await self._sessions.close_all(str(KeyReference(account_id, key.id)))
            await self._registry.api_keys.revoke(account_id, key.id, even_last=True)

    async def _has_reservations(self, account_id: str) -> bool:
        reservations, _ = reservation_keys(partition_tag(account_id))
        held = await self._store.client.hvals(reservations)
        return any(each.partition(" ")[0] == account_id for each in held)

    async def _remove_apps(self, account_id: str) -> Set[str]:
        """Removes the apps, and what the storage has of them. Returns their ids and names."""
        leaving, client, tag = leaving_key(account_id), self._store.client, partition_tag(account_id)
        apps = await self._registry.list_apps(account_id)
        deploys = await self._deploy_records.list(account_id, None, MAX_LISTED)
        deleted = await client.hvals(deleted_data_key(account_id))
        words = {word for app in apps for word in (app.id, app.name)}
        words |= {word for deploy in deploys for word in (deploy.appId, deploy.app)}
        for gone in (msgspec.json.decode(record, type=DeletedData) for record in deleted):
            words |= {gone.appId, gone.app}
        if words:
            await client.sadd(leaving, *words)
        for app in apps:
            await self._removal.remove(app)
        for record in await client.hvals(hooks_key(account_id)):
            hashed, _ = msgspec.json.decode(record, type=tuple[str, Hook])
            await client.delete(hook_key(hashed))
        for name in await client.smembers(former_names_key(account_id)):
            if await self._store.get(former_name_key(name)) == account_id:
                await client.delete(former_name_key(name))
        words = set(await client.smembers(leaving))
        for word in words:
            owner = await self._registry.find_app(word)
            if owner is None:
                for folder in ("sources/", "archives/", FOLDER):
                    await self._storage.delete_folder(f"{folder}{word}")
                await client.delete(app_window_key(tag, word), *key_set_keys(account_id, word))
        return words

    async def _remove_deleted_data(self, account_id: str) -> None:
        for record_id, record in (await self._store.client.hgetall(deleted_data_key(account_id))).items():
            deleted = msgspec.json.decode(record, type=DeletedData)
            await self._storage.delete([snapshot_key(deleted.appId, each.id) for each in deleted.snapshots])
            await self._data_records.remove_deleted(account_id, record_id)

    async def _remove_deploys(self, account_id: str) -> None:
        tag = partition_tag(account_id)
        for deploy in await self._deploy_records.list_all(account_id):
            await self._storage.delete([f"logs/{deploy.createdAt[:10]}/{deploy.id}.gz"])
            keys = [make(account_id, deploy.id) for make in (deploy_key, deploy_log_key, answer_key)]
            await self._store.client.delete(*keys)
            await self._store.client.zrem(failed_deploys_key(tag), f"{account_id} {deploy.id}")

    async def _keep_spend(self, account_id: str) -> None:
        """Keeps the spend of each day, before its sources are removed. What is kept already stays."""
        now, key = time.time(), spend_of_deleted_key(account_id)
        days = [day_of(int((now - ago * DAY_SECONDS) * 1000)) for ago in range(SPEND_DAYS)]
        settled = await self._store.read_each(days, lambda pipe, day: pipe.hget(spend_key(account_id, day), "settled"))
        counted = await self._store.read_each(days, lambda pipe, day: pipe.hgetall(usage_key(account_id, day)))
        async with self._store.client.pipeline(transaction=True) as pipe:
            for day, spent, counts in zip(days, settled, counted, strict=True):
                used = sum(int(count) for name, count in counts.items() if name.endswith("/nanoEuro"))
                if nano := int(spent or used):
                    pipe.hsetnx(key, day, nano)
            pipe.expire(key, SPEND_DAYS * DAY_SECONDS)
            await pipe.execute()

    async def _remove_entries(self, account_id: str, words: Set[str]) -> None:
        """Removes the entries of shared streams, sets and hashes that name the account."""
        client, tag, now = self._store.client, partition_tag(account_id), time.time()
        streams = [stream_key(tag, name) for name in ("events", "builds", MAILS)]
        for stream in (*streams, dead_letters_key(tag)):
            async for entry, fields in self._read_stream(stream):
                if any(account_id in value for value in fields.values()):
                    await client.xdel(stream, entry)
        # The deletion itself stays in the operators' trail.
        named = {account_id, *words}
        for trail in ("changes", "reports"):
            async for entry, fields in self._read_stream(audit_key(trail)):
                record = msgspec.json.decode(fields["record"])
                details = record["details"]
                concerned = {record["target"], details.get("account"), details.get("id")} & named
                if concerned and record["action"] != "delete_account":
                    await client.xdel(audit_key(trail), entry)
        days = [day_of(int((now - ago * DAY_SECONDS) * 1000)) for ago in range(SPEND_DAYS)]
        await self._store.read_each(days, lambda pipe, day: pipe.zrem(spenders_key(day), account_id))
        for provider in self._providers:
            _, _, waiting, order, past, *_ = lease_keys(provider)
            for zset in (order, past, answers_of_provider_key(provider)):
                await client.zrem(zset, account_id)
            await client.hdel(waiting, account_id)
            if account_id in (await self._store.get(failed_accounts_key(provider)) or ""):
                await client.delete(failed_accounts_key(provider))  # a row of failures begins anew
        for zset in (BUILD_QUEUE_KEYS[2], stored_key(tag)):
            await client.zrem(zset, account_id)

    async def _read_stream(self, stream: str) -> AsyncIterator[tuple[str, dict[str, str]]]:
        after = "-"
        while page := await self._store.client.xrange(stream, after, "+", count=PAGE):
            for entry in page:
                yield entry
            after = f"({page[-1][0]}"

    async def _remove_keys(self, account_id: str, words: Set[str]) -> int:
        """Removes all keys of the partition that have the account's id in their name, but the record and the spend.

        Also removes the rate windows of the users of its apps. Returns the number of keys.
        """
        tag, kept = partition_tag(account_id), {account_key(account_id), spend_of_deleted_key(account_id)}
        names = await self._store.list_keys(f"{tag}:*{account_id}*", tag)
        left = [name for name in names if name not in kept and account_id in name.split(":")]
        windows = user_window_key(tag, "", "").rstrip(":")
        left += [name for name in await self._store.list_keys(f"{windows}:*", tag) if name.split(":")[3] in words]
        for name in left:
            await self._store.client.delete(name)
        return len(left)


async def list_due(store: Store) -> list[str]:
    """Returns accounts whose grace has ended. Raises BackboneUnavailable."""
    now = int(time.time() * 1000)
    pages = await store.read_each(
        PARTITION_TAGS,
        lambda pipe, tag: pipe.zrangebyscore(deletions_key(tag), "-inf", now, start=0, num=ACCOUNTS_AT_A_TIME),
    )
    return [account for page in pages for account in page]
