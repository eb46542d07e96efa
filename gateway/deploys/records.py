"""The records of deploys, as they are read: one, those of an account, or those in progress."""

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.deploys import positions
from gateway.errors import RequestMalformed
from gateway.events.catalog import Kind
from gateway.keys import PARTITION_TAGS, deploy_key, deploys_key, partition_tag, site_key, stream_key, tagged_deploy_key
from gateway.loops import batched
from gateway.settings import Settings

STREAM, GROUP = "builds", "deploys"
SCAN_LIMIT = 1_000  # entries read from one partition's stream
RECORDS_PER_READ = 100  # in one round trip
MAX_LISTED = 1_000  # deploys in an account's list; their records and logs are kept longer

Trigger = Literal["hook", "upload", "branch", "operator", "rollback", "promote", "redeploy", "restore"]
State = Literal["queued", "building", "checking", "canary", "live", "failed", "canceled"]
FINAL: tuple[State, ...] = ("live", "failed", "canceled")
PREVIEW_FIELD = "preview:"  # of the app's site, followed by the preview's address: the deploy that it serves
MESSAGE_LENGTH = 200  # characters


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Who queued a deploy, and what its source is."""

    by: str | None = None  # the name of an API key or a hook, the address of a member, or "operator"
    message: str | None = None  # of the commit, or the publisher's own
    commit: str | None = None
    branch: str | None = None  # of the source; a preview's decides its address
    dirty: bool | None = None  # whether the source has changes that are not in the commit


class Deploy(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    account: str
    app: str
    appId: str
    kind: Kind
    state: State
    trigger: Trigger
    createdAt: str
    source: str = ""  # id of a stored source; empty: the repository
    release: str | None = None  # id of the deploy whose release is served again, instead of a build
    restores: str | None = None  # the storage's key of the snapshot whose data it restores
    by: str | None = None  # as in its `Origin`
    message: str | None = None
    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None
    warning: str | None = None  # what its source lacks, or what of it does not count
    digest: str | None = None  # hexadecimal SHA-256 of the archive of its release
    size: int | None = None  # bytes of the archive
    startedAt: str | None = None
    checkingAt: str | None = None  # end of the build
    canaryAt: str | None = None  # end of the health check
    finishedAt: str | None = None
    durationMs: int | None = None
    url: str | None = None
    error: str | None = None
    serviceFault: bool = False  # the service has failed, not the app; older records do not say it


class DeployRecords:
    """Reads the records. `states.py` changes them."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._registry, self._store = settings, registry, registry.store

    async def get(self, deploy_id: str, account_id: str) -> Deploy | None:
        record = await self._store.client.hgetall(deploy_key(account_id, deploy_id))
        return msgspec.convert(record, Deploy, strict=False) if record else None

    async def find(self, deploy_id: str) -> Deploy | None:
        """Finds a deploy of any account. The id does not contain the account, so this reads every partition."""
        found = await self._get_all([tagged_deploy_key(tag, deploy_id) for tag in PARTITION_TAGS])
        return found[0] if found else None

    async def find_live_id(self, app: App) -> str | None:
        """Returns the id of the deploy that the app serves."""
        live: str | None = await self._store.client.hget(site_key(app.account, app.id), "live")
        return live

    async def find_served(self, account_id: str, app_ids: Collection[str]) -> dict[tuple[str, str], str]:
        """Returns the ids of the deploys that these apps serve, by app and address."""
        ids = [*app_ids]
        sites = await self._store.read_each(ids, lambda pipe, app: pipe.hgetall(site_key(account_id, app)))
        return {
            (app, name.removeprefix(PREVIEW_FIELD)): deploy
            for app, site in zip(ids, sites, strict=True)
            for name, deploy in site.items()
            if name == "live" or name.startswith(PREVIEW_FIELD)
        }

    async def list(self, account_id: str, app: str | None, limit: int, before: str = "") -> Sequence[Deploy]:
        """Returns deploys, newest first. Raises RequestMalformed.

        `app` is an app's id or name; its deploys before it was renamed count, too. `before` is the last deploy of the
        previous page.
        """
        present = await self._registry.find_app(app) if app else None
        names = {app, present.id} if present is not None and present.account == account_id else {app}
        last = -1 if app or before else limit - 1
        ids: Sequence[str] = await self._store.client.zrevrange(deploys_key(account_id), 0, last)
        if before:
            if before not in ids:
                raise RequestMalformed("before: there is no deploy of this id; leave it out to begin with the newest.")
            ids = ids[ids.index(before) + 1 :]
        found: Sequence[Deploy] = []
        for batch in batched(ids, RECORDS_PER_READ):
            deploys = await self._get_all([deploy_key(account_id, name) for name in batch])
            found = [*found, *(deploy for deploy in deploys if not app or names & {deploy.app, deploy.appId})]
            if len(found) >= limit:
                break
        return found[:limit]

    async def list_all(self, account_id: str) -> Sequence[Deploy]:
        """Returns all deploys of the account, those that its list does not have any more, too. In no order.

        Reads the accounts of all deploys of the partition: only for what is rare.
        """
        tag = partition_tag(account_id)
        keys, own = [*await self._store.list_keys(tagged_deploy_key(tag, "*"), tag)], list[str]()
        for batch in batched(keys, RECORDS_PER_READ):
            accounts = await self._store.read_each(batch, lambda pipe, key: pipe.hget(key, "account"))
            own += [key for key, account in zip(batch, accounts, strict=True) if account == account_id]
        return await self._get_all(own)

    async def find_positions(self, deploys: Sequence[Deploy]) -> dict[str, dict[str, int | str]]:
        """Returns the position and reason of each queued deploy, by id."""
        queued = [deploy.id for deploy in deploys if deploy.state == "queued"]
        if not queued:
            return {}
        if self._settings.deploy_engine == "external":
            return {deploy_id: {"waitsFor": positions.EXTERNAL} for deploy_id in queued}
        known = await positions.read_positions(self._store)
        missing = positions.NO_WORKER if known is None else positions.BEING_TAKEN
        found = {name: msgspec.structs.asdict(position) for name, position in (known or {}).items()}
        return {deploy_id: found.get(deploy_id, {"waitsFor": missing}) for deploy_id in queued}

    async def list_queued(self) -> Sequence[Deploy]:
        """Returns the queued deploys of all accounts, oldest first within each partition."""
        return [deploy for deploy in await self.list_in_progress() if deploy.state == "queued"]

    async def list_in_progress(self) -> Sequence[Deploy]:
        """Returns all deploys that are queued or in progress."""
        records = []
        for tag in PARTITION_TAGS:
            entries = await self._store.client.xrange(stream_key(tag, STREAM), count=SCAN_LIMIT)
            # A worker moves an entry without an id to the dead letters.
            records += [tagged_deploy_key(tag, entry["id"]) for _, entry in entries if "id" in entry]
        return await self._get_all(records)

    async def _get_all(self, records: Sequence[str]) -> Sequence[Deploy]:
        """Returns the records that exist, in the same order, with one round trip per hundred."""
        found: list[Deploy] = []
        for batch in batched(records, RECORDS_PER_READ):
            answers = await self._store.read_each(batch, lambda pipe, key: pipe.hgetall(key))
            found += [msgspec.convert(record, Deploy, strict=False) for record in answers if record]
        return found
