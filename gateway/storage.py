"""Stores sources, archives of releases and logs of deploys as objects in one store that all processes share.

    sources/<app id>/<source id>.tar.gz      archives/<app id>/<deploy id>.tar.gz      logs/<day>/<deploy id>.gz

The store is a folder (the data folder, unless GATEWAY_STORAGE_URL names another one) or an S3 bucket. A reader finds
an object complete or not at all.

No key leads out of the store. In a folder, no link below its top is followed: whoever may write there, such as a
gateway with a user of its own, must not make workers read, write or delete elsewhere as root.

Failure policy: every call has a time limit and fails with StorageUnavailable, for a key that no object has too, and
with its subclass StorageFull if a disk or a quota is full. Its log line has only the operation and the kind of error,
because a store's messages may contain addresses and the names of credentials.
"""

import asyncio
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from urllib.parse import unquote, urlsplit

import structlog

from gateway.cancellation import end_if_canceled
from gateway.errors import StorageFull, StorageUnavailable
from gateway.settings import Settings

logger = structlog.get_logger()

CALL_SECONDS = 30.0  # for calls that transfer little
FILE_SECONDS = 600.0  # for the transfer of a whole file
CHUNK_BYTES = 1_048_576
MAX_LISTED = 10_000  # names in one listing
LONGEST_PAUSE_SECONDS = 5.0  # between two attempts while the storage is unavailable
MAX_AWAY_SECONDS = 3_600.0  # that work waits for an unavailable storage
FULL_ATTEMPTS = 5  # of work that finds a disk full; they take three seconds
KEY_BYTES, PART_BYTES = 1_024, 255  # of S3, and of a file system
# A folder that is only passed through may be one that this user cannot list.
PASSED = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)  # a pipe, which is no object, must not hold the reader
FULL = (errno.ENOSPC, errno.EDQUOT)
# How MinIO, Ceph and other stores with S3's interface answer when their disks or the quota of a bucket are full.
_FULL_S3 = re.compile(r"status code: 507\b|<Code>(XMinioStorageFull|InsufficientStorage|\w*QuotaExceeded)</Code>")
_NO_PART = re.compile(r"\.{0,2}|.*[\\\x00-\x1f\x7f\ud800-\udfff].*", re.DOTALL)

T = TypeVar("T")


class Object(NamedTuple):
    size: int
    chunks: AsyncGenerator[bytes]  # the reader must close it, which closes the file


class Listed(NamedTuple):
    name: str
    size: int  # bytes
    version: str  # changes with the content


@runtime_checkable
class Storage(Protocol):
    """A store of objects. Every method raises StorageUnavailable."""

    async def put(self, key: str, content: bytes | Path) -> None:
        """Stores the bytes or the file. The file may be moved away."""

    async def open(self, key: str) -> Object | None: ...

    async def exists(self, key: str) -> bool: ...

    async def copy(self, source: str, target: str) -> bool:
        """Copies an object. Returns False if there is no such source."""

    async def list_names(self, prefix: str) -> list[str]:
        """Returns at most `MAX_LISTED` names below a prefix that ends with a slash, without the prefix."""

    async def list_objects(self, prefix: str) -> list[Listed]:
        """Returns all objects below a prefix that ends with a slash, by their names without the prefix."""

    async def list_folders(self, prefix: str) -> list[str]: ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Deletes the objects that exist."""

    async def delete_folder(self, prefix: str) -> None: ...


def is_key(key: str) -> bool:
    """Returns whether an object can have this key: folders and a name that mean the same in every store."""
    parts = key.split("/")
    return not any(map(_NO_PART.fullmatch, parts)) and (
        len(key.encode()) <= KEY_BYTES and max(len(part.encode()) for part in parts) <= PART_BYTES
    )


def _check_key(key: str) -> str:
    if not is_key(key):
        logger.warning("storage.failed", operation="check", error="the key is none that an object can have")
        raise StorageUnavailable
    return key


def _check_prefix(prefix: str) -> str:
    """Returns the folder that the prefix names."""
    return _check_key(prefix.removesuffix("/"))


def open_storage(settings: Settings) -> Storage:
    url = urlsplit(settings.storage_url)
    if url.scheme == "s3":
        return S3Storage(url.netloc, url.path.strip("/"))
    if url.scheme:
        return FolderStorage(Path(unquote(url.path)), mounted=True)
    return FolderStorage(Path(settings.data_dir))


def find_folder_fault(folder: Path) -> str:
    """Returns why this process cannot write to the folder, which may not exist yet, or an empty string if it can."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir():
        return f"{str(nearest)!r} is not a folder"
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return f"user {os.geteuid()} may not write to {str(nearest)!r}"
    return ""


def closed_folders(folder: Path) -> list[Path]:
    """Returns those of the folder and its parents that other users cannot traverse."""
    return [path for path in (folder, *folder.parents) if not path.stat().st_mode & stat.S_IXOTH]


async def read_object(storage: Storage, key: str, limit: int) -> bytes | None:
    """Returns an object of at most `limit` bytes, or None if it does not exist. Raises StorageUnavailable."""
    with storage_failures("read"):
        async with asyncio.timeout(CALL_SECONDS):
            found = await storage.open(key)
            if found is None:
                return None
            content = bytearray()
            async with aclosing(found.chunks) as chunks:
                async for chunk in chunks:
                    content += chunk
                    if len(content) > limit:
                        raise OSError("the object is larger than it may be")
            return bytes(content)


async def fetch_object(storage: Storage, key: str, path: Path, limit: int) -> bool:
    """Writes an object of at most `limit` bytes to a file. Returns False if it does not exist.

    Raises StorageUnavailable.
    """
    with storage_failures("fetch"):
        async with asyncio.timeout(FILE_SECONDS):
            found = await storage.open(key)
            if found is None:
                return False
            size = 0
            async with aclosing(found.chunks) as chunks:
                with path.open("wb") as file:
                    async for chunk in chunks:
                        size += len(chunk)
                        if size > limit:
                            raise OSError("the object is larger than it may be")
                        await asyncio.to_thread(file.write, chunk)
            return True


async def until_storage_answers(attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeats `attempt` while the storage is unavailable.

    Raises StorageFull after a few attempts, because somebody must make room, and StorageUnavailable after an hour.
    """
    ends, pause, found_full = asyncio.get_running_loop().time() + MAX_AWAY_SECONDS, 0.2, 0
    while True:
        try:
            return await attempt()
        except StorageUnavailable as error:
            end_if_canceled()
            found_full += is_full(error)
            if found_full == FULL_ATTEMPTS or asyncio.get_running_loop().time() > ends:
                raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


@contextmanager
def storage_failures(operation: str, *, may_miss: bool = False) -> Iterator[None]:
    """Maps every failure to StorageUnavailable; with `may_miss`, except FileNotFoundError."""
    try:
        yield
    except (asyncio.CancelledError, StorageUnavailable):
        raise
    except Exception as error:  # obstore's errors have several bases
        if may_miss and isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
            raise
        logger.warning("storage.failed", operation=operation, error=_describe_error(error))
        raise (StorageFull if is_full(error) else StorageUnavailable) from error


@contextmanager
def full_disk_failures() -> Iterator[None]:
    """Maps the error of a full disk to StorageFull, where a file is written on its way to the storage."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        logger.warning("storage.failed", operation="write", error=_describe_error(error))
        raise StorageFull from error


def is_full(error: BaseException) -> bool:
    """Returns whether an error says that a disk or a quota is full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    return isinstance(error, StorageFull) or _FULL_S3.search(str(error)) is not None


def check_exit_code(code: int) -> None:
    """Raises OSError if a process that packs or unpacks has ended with the number of the error of a full disk."""
    if code in FULL:
        raise OSError(code, os.strerror(code))


def _describe_error(error: Exception) -> str:
    """Returns the kind of the error, without its text, which may contain secrets unless it is the system's."""
    detail = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    return f"{type(error).__name__}{detail}"


class FolderStorage:
    """Files in a folder that all processes share, readable only by its owner and the workers.

    If a `mounted` folder does not exist, the storage is unavailable. Any other folder is created when it is needed.
    """

    def __init__(self, folder: Path, *, mounted: bool = False) -> None:
        self.folder, self._mounted = folder, mounted

    async def put(self, key: str, content: bytes | Path) -> None:
        await self._call("put", self._put, key, content, seconds=FILE_SECONDS)

    def _put(self, key: str, content: bytes | Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._enter(key, create=True) as (folder, name):
            partial = f".{secrets.token_hex(16)}.part"
            try:
                _fill(folder, partial, content)
                with open(os.open(partial, READ, dir_fd=folder), "rb") as file:
                    os.fchmod(file.fileno(), 0o600)
                    os.fsync(file.fileno())
                    if os.geteuid() == 0:  # gateways read it as the user who owns the folder
                        owner = self.folder.stat()
                        os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
                os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with suppress(OSError):
                    os.unlink(partial, dir_fd=folder)
                raise

    @contextmanager
    def _enter(self, key: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Yields a descriptor of the object's folder, and the object's name in it. Raises OSError."""
        *parts, name = _check_key(key).split("/")
        with self._open_folder(parts, create=create) as folder:
            yield folder, name

    @contextmanager
    def _open_folder(self, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
        folder = os.open(self.folder, PASSED & ~os.O_NOFOLLOW)
        try:
            for part in parts:
                if create:
                    self._make_folder(folder, part)
                inner = os.open(part, PASSED, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _make_folder(self, folder: int, name: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(name, 0o711, dir_fd=folder)
            if os.geteuid() == 0:
                owner = self.folder.stat()
                os.chown(name, owner.st_uid, owner.st_gid, dir_fd=folder, follow_symlinks=False)

    async def open(self, key: str) -> Object | None:
        found: Object | None = await self._call("open", self._open, key)
        if found is not None:
            await anext(found.chunks)  # it has begun, so who closes it unread closes the file too
        return found

    def _open(self, key: str) -> Object | None:
        try:
            with self._enter(key) as (folder, name):
                descriptor = os.open(name, READ, dir_fd=folder)
        except FileNotFoundError:
            return None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "the object is no file")
        file = os.fdopen(descriptor, "rb")

        async def chunks() -> AsyncGenerator[bytes]:
            with file:
                yield b""
                while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    yield chunk

        return Object(status.st_size, chunks())

    async def exists(self, key: str) -> bool:
        return await self._call("exists", self._exists, key)

    def _exists(self, key: str) -> bool:
        try:
            with self._enter(key) as (folder, name):
                return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    async def copy(self, source: str, target: str) -> bool:
        return await self._call("copy", self._copy, source, target, seconds=FILE_SECONDS)

    def _copy(self, source: str, target: str) -> bool:
        if not self._exists(source):
            return False
        with self._enter(source) as (source_folder, source_name), self._enter(target, create=True) as (folder, name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            try:  # objects never change
                os.link(source_name, name, src_dir_fd=source_folder, dst_dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                return False
        return True

    async def list_names(self, prefix: str) -> list[str]:
        return [each.name for each in await self._call("list", self._list, prefix)][:MAX_LISTED]

    async def list_objects(self, prefix: str) -> list[Listed]:
        return await self._call("list", self._list, prefix, seconds=FILE_SECONDS)

    def _list(self, prefix: str) -> list[Listed]:
        found = list[Listed]()
        with suppress(FileNotFoundError), self._open_folder(_check_prefix(prefix).split("/")) as top:
            for inside, _, names, folder in os.fwalk(".", dir_fd=top):
                for name in names:
                    with suppress(FileNotFoundError):
                        status, path = os.lstat(name, dir_fd=folder), os.path.join(inside, name).removeprefix("./")
                        if stat.S_ISREG(status.st_mode) and not name.endswith(".part") and is_key(path):
                            found.append(Listed(path, status.st_size, str(status.st_mtime_ns)))
        return found

    async def list_folders(self, prefix: str) -> list[str]:
        return await self._call("list", self._folders, prefix)

    def _folders(self, prefix: str) -> list[str]:
        with suppress(FileNotFoundError), self._open_folder(_check_prefix(prefix).split("/")) as top:
            readable = os.open(".", READ, dir_fd=top)
            try:
                with os.scandir(readable) as entries:
                    return [each.name for each in entries if each.is_dir(follow_symlinks=False) and is_key(each.name)]
            finally:
                os.close(readable)
        return []

    async def delete(self, keys: Sequence[str]) -> None:
        await self._call("delete", self._delete, keys)

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError), self._enter(key) as (folder, name):
                os.unlink(name, dir_fd=folder)

    async def delete_folder(self, prefix: str) -> None:
        await self._call("delete", self._delete_folder, prefix)

    def _delete_folder(self, prefix: str) -> None:
        with suppress(FileNotFoundError), self._enter(_check_prefix(prefix)) as (folder, name):
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)

    async def _call(self, operation: str, work: Callable[..., T], *args: Any, seconds: float = CALL_SECONDS) -> T:
        def check_and_work() -> T:
            if self._mounted and not self.folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "the folder of the storage is not there")
            return work(*args)

        with storage_failures(operation):
            async with asyncio.timeout(seconds):
                return await asyncio.to_thread(check_and_work)


def _fill(folder: int, name: str, content: bytes | Path) -> None:
    """Makes the file. If the content is another file on the same file system, the new one is a hard link to it."""
    if isinstance(content, Path):
        with suppress(OSError):
            os.link(content, name, dst_dir_fd=folder)
            return
    with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder), "wb") as file:
        if isinstance(content, Path):
            with content.open("rb") as source:
                shutil.copyfileobj(source, file, CHUNK_BYTES)
        else:
            file.write(content)


class S3Storage:
    """A bucket of S3 or a compatible store. obstore reads the credentials and the endpoint from `AWS_*`."""

    def __init__(self, bucket: str, prefix: str) -> None:
        import obstore  # here, because it takes a hundred megabytes of memory, which a folder does not need
        from obstore.store import S3Store

        self._library = obstore
        endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT", "")
        self._store = S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=5),
                "read_timeout": timedelta(seconds=20),
                "timeout": timedelta(seconds=FILE_SECONDS),
            },
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=10)},
        )

    async def put(self, key: str, content: bytes | Path) -> None:
        await self._call("put", self._library.put_async(self._store, _check_key(key), content), FILE_SECONDS)

    async def open(self, key: str) -> Object | None:
        try:
            found = await self._call("open", self._library.get_async(self._store, _check_key(key)))
        except FileNotFoundError:
            return None

        async def chunks() -> AsyncGenerator[bytes]:
            async for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)

        return Object(int(found.meta["size"]), chunks())

    async def exists(self, key: str) -> bool:
        try:
            await self._call("exists", self._library.head_async(self._store, _check_key(key)))
        except FileNotFoundError:
            return False
        return True

    async def copy(self, source: str, target: str) -> bool:
        try:
            copying = self._library.copy_async(self._store, _check_key(source), _check_key(target))
            await self._call("copy", copying, FILE_SECONDS)
        except FileNotFoundError:
            return False
        return True

    async def list_names(self, prefix: str) -> list[str]:
        async def pages() -> list[str]:
            found: list[str] = []
            async for page in self._library.list(self._store, _check_prefix(prefix)):
                found += filter(is_key, (str(each["path"]).removeprefix(prefix) for each in page))
                if len(found) >= MAX_LISTED:
                    break
            return found[:MAX_LISTED]

        return await self._call("list", pages())

    async def list_objects(self, prefix: str) -> list[Listed]:
        async def pages() -> list[Listed]:
            return [
                Listed(name, int(each["size"]), str(each["e_tag"]))
                async for page in self._library.list(self._store, _check_prefix(prefix))
                for each in page
                if is_key(name := str(each["path"]).removeprefix(prefix))
            ]

        return await self._call("list", pages(), FILE_SECONDS)

    async def list_folders(self, prefix: str) -> list[str]:
        listing = self._library.list_with_delimiter_async(self._store, _check_prefix(prefix))
        found = await self._call("list", listing)
        return [str(name).rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]]

    async def delete(self, keys: Sequence[str]) -> None:
        with suppress(FileNotFoundError):
            if keys:
                await self._call("delete", self._library.delete_async(self._store, [_check_key(key) for key in keys]))

    async def delete_folder(self, prefix: str) -> None:
        folder = _check_prefix(prefix)
        await self.delete([f"{folder}/{name}" for name in await self.list_names(f"{folder}/")])

    @staticmethod
    async def _call(operation: str, work: Awaitable[T], seconds: float = CALL_SECONDS) -> T:
        with storage_failures(operation, may_miss=operation != "put"):
            async with asyncio.timeout(seconds):
                return await work
