"""Where backups are: a folder or an S3 prefix, with objects that several backups share.

    objects/<first two digits>/<SHA-256>       what was copied, named by its digest
    backups/<time>-<SHA-256 of its text>.json  one backup: what it consists of; written last

An object that is there already is not copied again, so a backup that was interrupted continues with the next one, and
backups that run side by side do not harm each other. A backup without its own file does not exist.

    marks/<running or pruning>-<ms>-<token>    a backup that runs, or one that removes what no backup needs any more

A backup relies on objects that it has found. So it writes its mark before it looks, and waits while another one prunes;
and nothing is pruned while another backup runs. Each of two that begin at once sees the other's mark. Marks of killed
processes count until they are too old.

Failure policy: every read is compared with the digest, and raises BadBackup if it differs. The file of a backup names
the digests of all its parts, and ends with an authenticator (HMAC-SHA-256) by the service's encryption key. So whoever
can write to the target can damage a backup, but not forge one. Without a key, nothing says who made a backup.
"""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
import zstandard

from gateway.accounts.vault import Vault
from gateway.cancellation import finish_despite_cancellation
from gateway.errors import StorageUnavailable
from gateway.ids import Time
from gateway.loops import batched
from gateway.settings.parsing import find_s3_fault
from gateway.storage import FolderStorage, Listed, S3Storage, Storage, read_object, storage_failures
from workers.backup.names import find_file_fault, find_record_fault
from workers.backup.scripts import KeyCopy

FORMAT = 1
MANIFEST = re.compile(r"(\d{8}T\d{9}Z)-([0-9a-f]{64})\.json")
AUTHENTICATED = re.compile(rb'(.*),"authenticator":"([0-9a-f]{64})"\}', re.DOTALL)
PURPOSE = "backup"  # of the signature
MARK = re.compile(r"(running|pruning)-(\d{1,15})-[0-9a-f]{16}")
PRUNING_SECONDS = 600  # after which no further objects are removed; the next backup continues
# After which a mark does not count: a backup takes at most a day, and a minute is left for the last objects.
MARK_SECONDS = {"running": 86_400, "pruning": PRUNING_SECONDS + 60}
POLL_SECONDS = 1.0  # while another one prunes
DELETED_AT_ONCE = 1_000  # objects
MANIFEST_BYTES = 16_777_216
LINE_BYTES = 4_194_304  # of records, before compression, in one object
LARGEST_LINES = 1 << 30  # bytes of such an object after decompression: one record may be long
T = TypeVar("T")


class BadBackup(Exception):
    """The backup cannot be used. The message is a sentence for the operator."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """An object of the target."""

    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # SHA-256
    size: Annotated[int, msgspec.Meta(ge=0)]  # bytes


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One backup."""

    format: int
    at: Time  # when the copy of Redis began
    layout: Annotated[int, msgspec.Meta(ge=1)]
    shared: bool  # whether the storage was a shared one
    keys: list[str]  # fingerprints of the encryption keys that a restore needs
    accounts: int
    apps: int
    size: int  # bytes of all files
    records: list[Part]  # of the keys in Redis
    files: list[Part]  # lists of the files, which are objects of their own
    notes: list[str] = []  # what the backup lacks


class BackupRow(msgspec.Struct, frozen=True):
    """A backup, in a listing."""

    at: str  # '' if not even its name says it
    state: Literal["complete", "damaged", "unauthenticated"]
    accounts: int | None = None
    apps: int | None = None
    size: int | None = None  # bytes
    notes: int | None = None  # their number
    detail: str = ""  # why it is not complete


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """A file of the storage, or of Caddy's folder."""

    name: str
    part: Part
    version: str  # as the storage knows it: a file with the same version is unchanged


class _Header(msgspec.Struct):
    """What the file of a backup has in every format."""

    format: int


async def read_part(
    storage: Storage, key: str, write: Callable[[bytes], object], limit: int | None = None
) -> Part | None:
    """Writes the object, or `limit` bytes of it and a little more. Returns None if it does not exist.

    Raises StorageUnavailable, and what `write` raises.
    """
    if (found := await storage.open(key)) is None:
        return None
    digest, size = hashlib.sha256(), 0
    async with aclosing(found.chunks) as chunks:
        while limit is None or size <= limit:
            with storage_failures("read"):
                if (chunk := await anext(chunks, None)) is None:
                    break
            digest.update(chunk)
            size += len(chunk)
            await asyncio.to_thread(write, chunk)
    return Part(digest.hexdigest(), size)


async def fetch_part(storage: Storage, key: str, path: Path, limit: int | None = None) -> Part | None:
    """Writes the object to a file, like `read_part`. Raises StorageUnavailable and OSError."""
    with path.open("wb") as file:
        return await read_part(storage, key, file.write, limit)


def open_target(address: str, *, create: bool = False) -> Storage:
    """Opens a folder or `s3://bucket/prefix`. Raises BadBackup."""
    try:
        url = urlsplit(address)
    except ValueError:
        raise BadBackup("the target is neither a folder nor s3://bucket/prefix") from None
    if url.scheme == "s3":
        if fault := find_s3_fault() or ("" if url.netloc else "s3:// needs the name of a bucket"):
            raise BadBackup(f"{address}: {fault}")
        return S3Storage(url.netloc, url.path.strip("/"))
    folder = Path(address)
    if create:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif not folder.is_dir():
        raise BadBackup(f"{address} is not a folder")
    return FolderStorage(folder, mounted=True)


class BackupTarget:
    """Reads and writes backups. Every method raises StorageUnavailable."""

    def __init__(self, storage: Storage, vault: Vault, *, unauthenticated: bool = False) -> None:
        """With `unauthenticated`, it does not matter who made a backup."""
        self._storage, self._vault, self._unauthenticated = storage, vault, unauthenticated
        self._present: dict[str, int] = {}  # sizes of the objects, by digest
        self.added = 0  # bytes
        self._own_marks: set[str] = set()

    @property
    def folder(self) -> Path | None:
        """The folder, unless it is S3."""
        return self._storage.folder if isinstance(self._storage, FolderStorage) else None

    # -- marks -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def marked_as(self, kind: Literal["running", "pruning"]) -> AsyncIterator[None]:
        """Shows others meanwhile that a backup runs, or prunes."""
        name = f"{kind}-{time.time() * 1000:.0f}-{secrets.token_hex(8)}"
        await self._storage.put(f"marks/{name}", b"")
        self._own_marks.add(name)
        try:
            yield
        finally:
            self._own_marks.discard(name)
            with suppress(StorageUnavailable):  # credentials that may only add: the mark counts until it is too old
                await finish_despite_cancellation(self._storage.delete([f"marks/{name}"]))

    async def _read_marks(self) -> dict[str, float]:
        """Returns the names of others' marks, with their ages in seconds."""
        names = {each.name for each in await self._storage.list_objects("marks/")} - self._own_marks
        found = filter(None, map(MARK.fullmatch, names))
        # One of the future ends as well: the clock of its machine may be wrong.
        return {mark[0]: abs(time.time() - int(mark[2]) / 1000) for mark in found}

    async def _is_marked(self, kind: Literal["running", "pruning"]) -> bool:
        marks = await self._read_marks()
        return any(age < MARK_SECONDS[kind] for name, age in marks.items() if name.startswith(kind))

    async def until_none_prunes(self) -> None:
        while await self._is_marked("pruning"):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    # -- objects ---------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Reads which objects are there."""
        listed = await self._storage.list_objects("objects/")
        self._present = {each.name.rpartition("/")[2]: each.size for each in listed}

    def has(self, part: Part) -> bool:
        """Returns whether the object is there with its whole size, as `look` found it."""
        return self._present.get(part.digest) == part.size

    async def add(self, part: Part, content: bytes | Path) -> None:
        """Adds an object unless it is there. The file may be moved away."""
        if not self.has(part):
            await self._storage.put(_object_key(part), content)
            self._present[part.digest] = part.size
            self.added += part.size

    async def fetch(self, part: Part, path: Path) -> None:
        """Writes the object to a file. Raises BadBackup and OSError."""
        _compare(part, await fetch_part(self._storage, _object_key(part), path, part.size))

    async def read(self, part: Part, write: Callable[[bytes], object]) -> None:
        """Reads the object. Raises BadBackup."""
        _compare(part, await read_part(self._storage, _object_key(part), write, part.size))

    # -- lists of records ------------------------------------------------------------------------------------

    async def add_lines(self, lines: bytes) -> Part:
        packed = await asyncio.to_thread(zstandard.ZstdCompressor(level=3).compress, lines)
        part = Part(hashlib.sha256(packed).hexdigest(), len(packed))
        await self.add(part, packed)
        return part

    async def read_lines(self, parts: list[Part]) -> AsyncIterator[list[bytes]]:
        """Yields the lines of each object. Raises BadBackup."""
        for part in parts:
            packed = bytearray()
            await self.read(part, packed.extend)
            yield (await asyncio.to_thread(_unpack, bytes(packed))).splitlines()

    async def list_files(self, manifest: BackupManifest) -> list[FileEntry]:
        """Returns the files of the backup. Raises BadBackup, also if a name is none that a backup has."""
        found: dict[str, FileEntry] = {}
        async for lines in self.read_lines(manifest.files):
            for line in lines:
                entry = _decode(line, FileEntry)
                if fault := find_file_fault(entry.name):
                    raise BadBackup(f"the backup of {manifest.at} {fault}")
                if entry.name in found:
                    raise BadBackup(f"the backup of {manifest.at} names a file twice: {entry.name!r}")
                found[entry.name] = entry
        return [*found.values()]

    # -- backups ---------------------------------------------------------------------------------------------

    async def list_backups(self) -> list[str]:
        """Returns the names of the backups, oldest first."""
        listed = await self._storage.list_objects("backups/")
        return sorted(each.name for each in listed if MANIFEST.fullmatch(each.name) and each.size <= MANIFEST_BYTES)

    async def describe_all(self) -> list[BackupRow]:
        """Describes every backup, oldest first, without reading the files in it."""
        await self.look()
        return [await self._describe(each) for each in sorted(await self._storage.list_objects("backups/"))]

    async def _describe(self, listed: Listed) -> BackupRow:
        name = listed.name
        try:
            if listed.size > MANIFEST_BYTES:
                raise BadBackup(f"the file backups/{name} is larger than any backup's; remove it")
            manifest, doubt = await self.inspect(name)
            parts = [*manifest.records, *manifest.files, *(each.part for each in await self.list_files(manifest))]
            if missing := [part.digest for part in parts if not self.has(part)]:
                raise BadBackup(f"the object {missing[0]} of the backup is missing or damaged")
        except BadBackup as error:
            matched = MANIFEST.fullmatch(name)
            return BackupRow(_read_stamp(matched[1]) if matched else "", "damaged", detail=str(error))
        state: Literal["complete", "unauthenticated"] = "unauthenticated" if doubt else "complete"
        figures = (manifest.accounts, manifest.apps, manifest.size, len(manifest.notes))
        return BackupRow(manifest.at, state, *figures, detail=doubt)

    async def write_manifest(self, manifest: BackupManifest) -> None:
        text = msgspec.json.encode(manifest)
        if self._vault.fingerprints():
            text = text[:-1] + f',"authenticator":"{self._vault.sign(PURPOSE, text).hex()}"}}'.encode()
        await self._storage.put(f"backups/{_stamp(manifest.at)}-{hashlib.sha256(text).hexdigest()}.json", text)

    async def read_manifest(self, name: str) -> BackupManifest:
        """Raises BadBackup, also if none of the keys has made the authenticator."""
        manifest, fault = await self.inspect(name)
        if fault and not self._unauthenticated:
            raise BadBackup(f"the backup of {manifest.at} {fault}")
        return manifest

    async def inspect(self, name: str) -> tuple[BackupManifest, str]:
        """Returns a backup, and why it may be of somebody else; '' if it is of this service. Raises BadBackup."""
        text = await read_object(self._storage, f"backups/{name}", MANIFEST_BYTES)
        matched = MANIFEST.fullmatch(name)
        if text is None or matched is None or hashlib.sha256(text).hexdigest() != matched[2]:
            raise BadBackup(f"the file backups/{name} is damaged; choose another backup with --at")
        if _decode(text, _Header).format != FORMAT:
            raise BadBackup(f"the backup {name} is of another format; use the version of capsule that made it")
        manifest = _decode(text, BackupManifest)
        if _stamp(manifest.at) != matched[1]:
            raise BadBackup(f"the file backups/{name} is of {manifest.at}, and was renamed; remove it")
        return manifest, self._find_doubt(text)

    def _find_doubt(self, text: bytes) -> str:
        if not self._vault.fingerprints():  # nobody can tell
            return ""
        found = AUTHENTICATED.fullmatch(text)
        if found is None:
            return (
                "has no authenticator: anybody who can write to the target may have made it. If you know that it is "
                "yours, because it is older than authenticators, add --unauthenticated"
            )
        if not self._vault.is_signed(PURPOSE, found[1] + b"}", bytes.fromhex(found[2].decode())):
            return "was made with none of the keys in GATEWAY_ENCRYPTION_KEY, or was changed: set the key of the backup"
        return ""

    async def find(self, until: str = "") -> BackupManifest:
        """Returns the last backup, or the last one until a time as `now_iso` formats it. Raises BadBackup."""
        names = [name for name in await self.list_backups() if not until or name.partition("-")[0] <= _stamp(until)]
        if not names:
            raise BadBackup(f"there is no backup{f' until {until}' if until else ''}")
        return await self.read_manifest(names[-1])

    async def prune(self, keep: int) -> int:
        """Removes all backups but the last `keep`, and the objects that no backup needs. Returns how many of both.

        Removes nothing while another backup runs: the next one does it. Raises BadBackup, and removes nothing, if a
        backup that is kept cannot be read.
        """
        async with self.marked_as("pruning"):
            if await self._is_marked("running") or await self._is_marked("pruning"):
                raise BadBackup("another backup runs")
            ends = time.monotonic() + PRUNING_SECONDS
            names = await self.list_backups()
            needed: set[str] = set()
            for name in names[-keep:]:
                manifest = await self.read_manifest(name)
                parts = [*manifest.records, *manifest.files, *(each.part for each in await self.list_files(manifest))]
                needed |= {part.digest for part in parts}
            present = [each.name for each in await self._storage.list_objects("objects/")]
            unneeded = [f"objects/{name}" for name in present if name.rpartition("/")[2] not in needed]
            old_marks = [
                f"marks/{name}" for name, age in (await self._read_marks()).items() if age > MARK_SECONDS["running"]
            ]
            removed = [*(f"backups/{name}" for name in names[:-keep]), *unneeded, *old_marks]  # backups come first
            count = 0
            for batch in batched(removed, DELETED_AT_ONCE):
                if time.monotonic() > ends:
                    break
                await self._storage.delete(batch)
                count += len(batch)
            return count

    async def verify(self, manifest: BackupManifest) -> int:
        """Reads all of the backup, and checks all its names. Returns the number of its objects. Raises BadBackup."""
        parts = {entry.part for entry in await self.list_files(manifest)}
        async for lines in self.read_lines(manifest.records):
            for line in lines:
                if fault := find_record_fault(_decode(line, KeyCopy)):
                    raise BadBackup(f"the backup of {manifest.at} {fault}")
        for part in sorted(parts, key=lambda part: part.digest):
            await self.read(part, len)
        return len(parts) + len(manifest.records) + len(manifest.files)


def _stamp(at: str) -> str:
    return re.sub(r"[-:.]", "", at)


def _read_stamp(stamp: str) -> str:
    """Returns the time, as `now_iso` formats it."""
    return re.sub(r"(....)(..)(..)T(..)(..)(..)(...)Z", r"\1-\2-\3T\4:\5:\6.\7Z", stamp)


def _decode(text: bytes, kind: type[T]) -> T:
    """Raises BadBackup."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadBackup(f"the backup is damaged, or of another program: {error}") from None


def _unpack(packed: bytes) -> bytes:
    """Raises BadBackup."""
    try:
        if zstandard.frame_content_size(packed) > LARGEST_LINES:  # it would be reserved at once
            raise BadBackup("the backup has a list that is longer than any")
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=LARGEST_LINES)
    except zstandard.ZstdError as error:
        raise BadBackup(f"the backup has a list that cannot be read: {error}") from None


def _compare(part: Part, found: Part | None) -> None:
    """Raises BadBackup."""
    if found != part:
        raise BadBackup(f"the object {part.digest} of the backup is {'missing' if found is None else 'damaged'}")


def _object_key(part: Part) -> str:
    return f"objects/{part.digest[:2]}/{part.digest}"


class Lines:
    """Collects records as lines of JSON, and adds them to the target, some megabytes per object."""

    def __init__(self, target: BackupTarget) -> None:
        self._target, self._lines, self._size = target, list[bytes](), 0
        self.parts: list[Part] = []

    async def write(self, record: msgspec.Struct) -> None:
        line = msgspec.json.encode(record)
        self._lines.append(line)
        self._size += len(line)
        if self._size > LINE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        if self._lines:
            self.parts.append(await self._target.add_lines(b"\n".join(self._lines)))
            self._lines, self._size = [], 0
