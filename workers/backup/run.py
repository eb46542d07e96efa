"""Makes a backup of the whole service, and restores one.

1. Hosts make snapshots of the apps' data, unless the storage is shared: then it has copies that are a minute old.
2. The storage is copied, then Redis, then what is new in the storage. So the backup has what the records name.
3. Caddy's certificates are copied, and last the backup's own file is written.

A restore verifies the whole backup before it writes anything. While it writes, the key `layout` has no number, so that
no process starts. Once the number is gone, it looks for processes again: one may have started during the verification.
A restore that was interrupted continues with the same command.

The encryption key is in no backup. A backup has its fingerprint and an authenticator made with it (`target.py`), and a
restore with another key is refused. Of several keys, a restore needs the first and those that open stored secrets.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.data.commands import DataCommands, DataUnavailable
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.ids import now_iso
from gateway.keys import BACKUP_KEY, LAYOUT_KEY, PROCESSES_KEY, account_key, kind_of, worker_key
from gateway.loops import batched
from gateway.operations.layout import LAYOUT, LayoutFault, parse_number
from gateway.operations.sealed import count_sealed
from gateway.redis.client import Store
from gateway.settings import Settings
from gateway.storage import FolderStorage, open_storage
from workers.backup.files import copy_files, list_certificates, list_objects, restore_files
from workers.backup.names import CERTIFICATES
from workers.backup.records import Copied, copy_records, is_known, spend_today, write_records
from workers.backup.spool import Spool, open_spool
from workers.backup.target import FORMAT, BackupManifest, BackupTarget, BadBackup, FileEntry, Lines
from workers.engine.app_data import AppData, list_data
from workers.engine.packing import DataError
from workers.hosting.data import HostData
from workers.sandbox.machine import Unsafe
from workers.sandbox.sandbox import APP_USERS, open_sandbox

SNAPSHOT_SECONDS = 1_800.0  # in which a host must make the snapshot of an app's data
SNAPSHOTS = 4  # at a time
ATTEMPTS = 3  # to copy records together with the files that they name
RESTORING = "restoring"  # in place of the layout's number
DELETED_AT_ONCE = 1_000  # keys
ENDED_AT_ONCE = 16  # apps


class BackupRefused(Exception):
    """Nothing was written. The message is a sentence for the operator."""


class Report(msgspec.Struct, frozen=True):
    """What was backed up or restored."""

    manifest: BackupManifest
    added: int  # bytes that were not in the target before
    notes: list[str]


class Backup:
    """Backs up the service of these settings, and restores it."""

    def __init__(self, settings: Settings, target: BackupTarget) -> None:
        self._settings, self._target = settings, target
        self._store = Store(settings.redis_url, ca_file=settings.ca_file)
        self._vault = Vault(settings.encryption_key)
        self._registry = Registry(self._store, self._vault)
        self._storage, self._folder = open_storage(settings), FolderStorage(Path(settings.data_dir))
        self._notes: list[str] = []
        self._needed_keys = {*self._vault.fingerprints()[:1]}  # the first makes the authenticator

    async def aclose(self) -> None:
        await self._store.close()

    # -- back up ---------------------------------------------------------------------------------------------

    async def make(self, keep: int = 0) -> Report:
        """Makes a backup, and removes all but the last `keep` (0: none).

        Raises BackupRefused, BackboneUnavailable, StorageUnavailable and SpoolFailed.
        """
        with open_spool(self._target.folder or self._folder.folder) as spool:
            async with self._target.marked_as("running"):
                await self._target.until_none_prunes()
                report = await self._make(spool)
                if keep:
                    try:
                        await self._target.prune(keep)
                    except BadBackup as error:
                        self._notes.append(f"no old backup was removed: {error}")
                return report

    async def _make(self, spool: Spool) -> Report:
        try:
            layout = parse_number(await self._store.get(LAYOUT_KEY) or "1")
        except LayoutFault as fault:
            raise BackupRefused(str(fault)) from None
        await self._check_secrets()
        keys = await self._store.list_keys()
        await self._target.look()
        await self._make_snapshots(keys)
        known = await self._read_last()
        entries = await copy_files(self._storage, await list_objects(self._storage), known, self._target, spool)
        for _ in range(ATTEMPTS):
            at, records = await self._read_time(), Lines(self._target)
            copied = await copy_records(self._store, records)
            present = await list_objects(self._storage)
            fresh = {key: listed for key, listed in present.items() if key not in entries}
            entries |= await copy_files(self._storage, fresh, {}, self._target, spool)
            if not (missing := copied.objects - entries.keys()):
                break
        else:
            self._notes.append(
                f"{len(missing)} objects that records name are not in the storage, such as {min(missing)}"
            )
        certificates = await list_certificates(self._folder)
        entries |= await copy_files(self._folder, certificates, known, self._target, spool, CERTIFICATES)
        files = Lines(self._target)
        for _, entry in sorted(entries.items()):
            await files.write(entry)
        await files.flush()
        await self._check_secrets()  # again: a process with an older key may have stored one meanwhile
        manifest = self._describe(at, layout, copied, records, files, entries.values())
        await self._target.write_manifest(manifest)
        await self._store.client.set(BACKUP_KEY, at)
        return Report(manifest, self._target.added, self._notes)

    async def _check_secrets(self) -> None:
        """Opens all stored secrets, and notes which keys they need. Raises BackupRefused if a key is missing."""
        counts = await count_sealed(self._store, self._vault)
        if counts.unopened:
            if not counts.keys:
                raise BackupRefused("GATEWAY_ENCRYPTION_KEY is not set, but stored secrets need it: set it")
            raise BackupRefused(
                f"GATEWAY_ENCRYPTION_KEY does not open {sum(counts.unopened.values())} stored secrets, such as that of "
                f"{min(counts.unopened)}: add their key to it. capsule secrets check names all of them"
            )
        self._needed_keys |= {key for key, count in counts.keys.items() if count}

    def _describe(
        self, at: str, layout: int, copied: Copied, records: Lines, files: Lines, entries: Iterable[FileEntry]
    ) -> BackupManifest:
        return BackupManifest(
            format=FORMAT,
            at=at,
            layout=layout,
            shared=bool(self._settings.storage_url),
            keys=sorted(self._needed_keys),
            accounts=copied.accounts,
            apps=copied.apps,
            size=sum(entry.part.size for entry in entries) + sum(part.size for part in records.parts),
            records=records.parts,
            files=files.parts,
            notes=self._notes,
        )

    async def _read_time(self) -> str:
        seconds, microseconds = await self._store.client.time()
        return now_iso(seconds + microseconds / 1_000_000)

    async def _read_last(self) -> dict[str, FileEntry]:
        """Returns the files of the last backup, by name. A damaged or forged one is of no use, and does no harm."""
        with suppress(BadBackup):
            return {entry.name: entry for entry in await self._target.list_files(await self._target.find())}
        return {}

    async def _make_snapshots(self, keys: Iterable[str]) -> None:
        """Lets the host of the apps' data make snapshots, because nothing else can read the data consistently."""
        apps = sorted(tuple(key.split(":")[2:4]) for key in keys if kind_of(key) == "data")
        if not apps:
            return
        if not any(key.startswith(worker_key("sites", "")) for key in keys):
            self._notes.append("no `sites` worker runs, so the data of apps are as of their last snapshots")
            return
        commands, slots, gone = DataCommands(self._store), asyncio.Semaphore(SNAPSHOTS), asyncio.Event()

        async def snapshot(account: str, app_id: str) -> str:
            """Returns what went wrong, or ''. Once the worker is gone, no other app waits for it in vain."""
            async with slots:
                if gone.is_set():
                    return "no `sites` worker runs any longer"
                try:
                    return (await commands.run(account, app_id, "snapshot", SNAPSHOT_SECONDS, reason="backup")).error
                except DataUnavailable:
                    if not await self._store.list_keys(worker_key("sites", "*")):
                        gone.set()
                    return "its host did not answer"

        async def snapshot_and_note(account: str, app_id: str) -> None:
            if error := await snapshot(account, app_id):
                self._notes.append(f"the data of {app_id} are as of its last snapshot: {error}")

        await asyncio.gather(*(snapshot_and_note(account, app_id) for account, app_id in apps))

    # -- restore ---------------------------------------------------------------------------------------------

    async def restore(
        self,
        until: str = "",
        *,
        force: bool = False,
        spent_today: bool = False,
        dry_run: bool = False,
        announce: Callable[[BackupManifest], None] = lambda _: None,
    ) -> Report:
        """Restores the last backup, or the last one until a time, and announces which before it writes anything.

        `force` replaces what is there, and ends the apps that run. `spent_today` uses up all caps of this day.
        `dry_run` checks all that a restore checks, and writes nothing. Raises BackupRefused, BadBackup,
        BackboneUnavailable, StorageUnavailable and SpoolFailed.
        """
        manifest = await self._target.find(until)
        marker = f"{RESTORING} {manifest.at}"
        resumes = await self._store.get(LAYOUT_KEY) == marker
        keys = await self._check(manifest, force=force or resumes)
        announce(manifest)
        await self._target.look()
        await self._target.verify(manifest)
        entries = await self._target.list_files(manifest)
        if dry_run:
            if replaced := sum(key == account_key(key.rpartition(":")[2]) for key in keys):
                self._notes.append(f"a restore would replace the accounts that are here: {replaced}")
            if running := await asyncio.to_thread(self._list_running):
                self._notes.append(f"a restore would end the apps that run here: {len(running)}")
            return Report(manifest, 0, self._notes)
        former = await self._store.client.set(LAYOUT_KEY, marker, get=True)
        try:
            keys = await self._check(manifest, force=force or resumes)  # a process may have started since the first one
            await self._end_apps()
        except BaseException:  # even Ctrl-C: nothing was written, so the service may start
            with suppress(BackboneUnavailable):
                if former is None:
                    await self._store.client.delete(LAYOUT_KEY)
                else:
                    await self._store.client.set(LAYOUT_KEY, former)
            raise
        present = await list_objects(self._storage) if resumes else {}
        with open_spool(self._folder.folder) as spool:
            await restore_files(entries, self._target, spool, self._storage, self._folder, present)
        await self._write_redis(manifest, keys)
        if self._settings.apps_engine == "local":  # a cluster takes the snapshots itself
            await self._unpack_data()
        if spent_today:
            await spend_today(self._store, self._settings)
        await self._storage.put("layout", f"{manifest.layout}\n".encode())
        await self._store.client.set(LAYOUT_KEY, manifest.layout)
        return Report(manifest, 0, self._notes)

    async def _check(self, manifest: BackupManifest, *, force: bool) -> set[str]:
        """Returns the keys that are in Redis. Raises BackupRefused."""
        if manifest.layout > LAYOUT:
            raise BackupRefused(f"the backup is of layout {manifest.layout}, and this version knows {LAYOUT}")
        if not {*manifest.keys} <= {*self._vault.fingerprints()}:
            raise BackupRefused(
                "GATEWAY_ENCRYPTION_KEY lacks a key that the backup needs: set the keys that the service had then"
            )
        if manifest.shared != bool(self._settings.storage_url):
            where = "a shared storage: set" if manifest.shared else "a data folder without shared storage: unset"
            raise BackupRefused(f"the backup is of {where} GATEWAY_STORAGE_URL")
        keys = await self._store.list_keys()
        if PROCESSES_KEY in keys or any(kind_of(key) == "worker" for key in keys):
            raise BackupRefused("gateways or workers run, or ran within the last 15 seconds: stop them first")
        if force:
            return keys
        if running := await asyncio.to_thread(self._list_running):
            raise BackupRefused(
                f"{len(running)} apps of this data folder run and would change their former data, such as "
                f"{running[0].app_id}; --force ends them first"
            )
        if any(kind_of(key) in ("account", "app") for key in keys):
            raise BackupRefused("Redis is not empty: it has accounts; --force replaces them")
        if await list_objects(self._storage):
            raise BackupRefused("the storage is not empty: it has files of apps; --force replaces them")
        return keys

    def _list_running(self) -> list[AppData]:
        return [data for data in list_data(self._folder.folder) if data.is_running]

    async def _end_apps(self) -> None:
        """Ends the apps that outlive their worker. Raises BackupRefused."""

        def end(data: AppData) -> None:
            try:
                with data.stopped():
                    pass
            except TimeoutError:
                raise BackupRefused(
                    f"{data.app_id} does not end: kill its processes, and run the command again"
                ) from None

        running = await asyncio.to_thread(self._list_running)
        for batch in batched(running, ENDED_AT_ONCE):
            await asyncio.gather(*(asyncio.to_thread(end, data) for data in batch))

    async def _write_redis(self, manifest: BackupManifest, keys: set[str]) -> None:
        replaced = [key for key in keys if is_known(key) and key != LAYOUT_KEY]
        for batch in batched(replaced, DELETED_AT_ONCE):
            await self._store.read_each(batch, lambda pipe, key: pipe.unlink(key))
        now = int((await self._store.client.time())[0]) * 1000
        async for lines in self._target.read_lines(manifest.records):
            await write_records(self._store, lines, now)
        for key in await self._store.list_keys():
            if kind_of(key) in ("members", "invitations"):
                await self._registry.members.list_again(key.split(":")[2])

    async def _unpack_data(self) -> None:
        """Unpacks the last snapshot of each app with data to the data folder of this machine."""
        keys = await self._store.list_keys()
        apps = sorted(tuple(key.split(":")[2:4]) for key in keys if kind_of(key) == "data")
        if not apps:
            return
        sandbox = open_sandbox(self._settings, APP_USERS)
        try:
            await asyncio.to_thread(sandbox.check, Path(self._settings.data_dir))
        except Unsafe as error:
            self._notes.append(f"the data of apps were not unpacked, but their snapshots are there: {error}")
            return
        data = HostData(self._settings, self._registry, sandbox)
        for account, app_id in apps:
            try:
                await data.fetch_newest(account, app_id)
            except (DataError, StorageUnavailable) as error:
                self._notes.append(f"the data of {app_id} were not unpacked: {error}")
