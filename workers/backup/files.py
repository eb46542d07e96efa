"""Copies files into a backup and back: the objects of the storage, and the certificates in Caddy's folder.

A file that has the same size and version as in the last backup is not read again. Objects of the storage never change,
but may be removed while they are copied; what the records need must be there in the end (`run.py`).
"""

import asyncio
from collections.abc import Mapping

from gateway.data.records import FOLDER
from gateway.storage import FolderStorage, Listed, Storage
from workers.backup.names import CADDY, CERTIFICATES, DATA, FOLDERS, TEMPORARY
from workers.backup.spool import Spool
from workers.backup.target import BackupTarget, FileEntry, fetch_part


async def list_objects(storage: Storage) -> dict[str, Listed]:
    """Returns the objects that a backup copies, by key. Raises StorageUnavailable."""
    found = {f"{top}{each.name}": each for top in FOLDERS for each in await storage.list_objects(top)}
    if isinstance(storage, FolderStorage):  # the present data of apps may be millions of files
        for app_id in await storage.list_folders(FOLDER):
            for kind in ("snapshots", "copies"):
                prefix = f"{FOLDER}{app_id}/{kind}/"
                found |= {f"{prefix}{each.name}": each for each in await storage.list_objects(prefix)}
    else:
        listed = await storage.list_objects(FOLDER)
        found |= {f"{FOLDER}{each.name}": each for each in listed if DATA.fullmatch(each.name)}
    return found


async def list_certificates(folder: FolderStorage) -> dict[str, Listed]:
    """Returns the files of Caddy's folder. Raises StorageUnavailable."""
    listed = await folder.list_objects(CADDY)
    return {f"{CADDY}{each.name}": each for each in listed if not each.name.endswith(TEMPORARY)}


async def copy_files(
    storage: Storage,
    present: Mapping[str, Listed],
    known: Mapping[str, FileEntry],
    target: BackupTarget,
    spool: Spool,
    prefix: str = "",
) -> dict[str, FileEntry]:
    """Copies the files into the target, unless they are `known` and unchanged. Returns their entries by name.

    `prefix` is added to their names. Leaves out files that are removed meanwhile. Raises StorageUnavailable and
    SpoolFailed.
    """
    entries = dict[str, FileEntry]()

    async def copy(key: str, listed: Listed) -> None:
        name = prefix + key
        before = known.get(name)
        if before is not None and _is_unchanged(before, listed) and target.has(before.part):
            entries[name] = before
            return
        async with spool.file(listed.size) as path:
            if (part := await fetch_part(storage, key, path)) is not None:
                await target.add(part, path)
                entries[name] = FileEntry(name, part, listed.version)

    async with asyncio.TaskGroup() as group:
        for key, listed in present.items():
            group.create_task(copy(key, listed))
    return entries


def _is_unchanged(before: FileEntry, listed: Listed) -> bool:
    return (before.version, before.part.size) == (listed.version, listed.size)


async def restore_files(
    entries: list[FileEntry],
    target: BackupTarget,
    spool: Spool,
    storage: Storage,
    caddy: FolderStorage,
    present: Mapping[str, Listed],
) -> None:
    """Writes the files to the storage and to Caddy's folder, unless one of this size is `present`.

    Raises BadBackup, StorageUnavailable and SpoolFailed.
    """

    async def restore(entry: FileEntry) -> None:
        if entry.name in present and present[entry.name].size == entry.part.size:
            return
        async with spool.file(entry.part.size) as path:
            await target.fetch(entry.part, path)
            key = entry.name.removeprefix(CERTIFICATES)
            await (caddy if key != entry.name else storage).put(key, path)

    async with asyncio.TaskGroup() as group:
        for entry in entries:
            group.create_task(restore(entry))
