"""Packs the data of an app into a tar.gz. This runs inside the sandbox, as the app's user: SQLite reads a customer's
files here, so a bug in it affects only the data of one app.

SQLite databases, which their header identifies, are copied with SQLite's own backup, while the app may write to them.
Other files are copied as they are. Links that leave the folder, sockets and devices are left out, and so are files
beyond the limit. Each line of output names something that is not in the archive as it should be. If the disk is full,
there is no archive, and the exit code is the number of the error.
"""

import errno
import io
import os
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from urllib.parse import quote

HEADER = b"SQLite format 3\0"
SUFFIXES = ("-wal", "-shm", "-journal")  # files of a database; its backup includes what they contain
LOCKED = (5, 6)  # SQLITE_BUSY, SQLITE_LOCKED
SQLITE_FULL = 13  # the disk of the copy
FULL = (errno.ENOSPC, errno.EDQUOT)
LOCKED_SECONDS = 30.0  # that all databases together may be locked
ATTEMPT_SECONDS = 0.25  # that an attempt to read a database waits
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Exact(io.RawIOBase):
    """Reads exactly `size` bytes of a file, which the app may truncate meanwhile."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._left = fd, size

    def read(self, size: int = -1) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        data = os.read(self._fd, size).ljust(size, b"\0")
        self._left -= size
        return data


class Packer:
    def __init__(
        self, tar: tarfile.TarFile, folder: str, copy: str, max_bytes: int, *, locked_seconds: float = LOCKED_SECONDS
    ) -> None:
        """`copy` is a path for the copy of one database at a time."""
        self._tar, self._folder, self._copy, self._left = tar, folder, copy, max_bytes
        self._attempts_left = locked_seconds / ATTEMPT_SECONDS

    def pack(self) -> None:
        for path, name in self._walk():
            self._tar.members.clear()  # type: ignore[attr-defined]  # millions of them would take too much memory
            try:
                self._add(path, name)
            except FileNotFoundError:
                continue  # the app has just removed it
            except OSError as error:
                if error.errno in FULL:
                    raise
                print(f"{name!r} is left out: {error.strerror}")

    def _walk(self) -> Iterator[tuple[str, str]]:
        """Yields each path, and its name in the archive. Folders come before their contents."""
        pending = [""]
        while pending:
            folder = pending.pop()
            try:
                names = sorted(os.listdir(os.path.join(self._folder, folder)))
            except OSError as error:
                print(f"{folder!r} is left out: {error.strerror}")
                continue
            databases = {name for name in names if self._is_database(folder, name, names)}
            for name in names:
                if any(name == database + suffix for database in databases for suffix in SUFFIXES):
                    continue
                relative = os.path.join(folder, name)
                path = os.path.join(self._folder, relative)
                if name in databases:
                    companions = [name + suffix for suffix in SUFFIXES[::2] if name + suffix in names]
                    yield from self._copied(path, relative, companions)
                    continue
                yield path, relative
                if os.path.isdir(path) and not os.path.islink(path):
                    pending.append(relative)

    def _is_database(self, folder: str, name: str, names: list[str]) -> bool:
        try:
            fd = os.open(os.path.join(self._folder, folder, name), READ)
        except OSError:
            return False
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return False
            return os.read(fd, len(HEADER)) == HEADER or (status.st_size == 0 and f"{name}-wal" in names)
        finally:
            os.close(fd)

    def _copied(self, path: str, name: str, companions: list[str]) -> Iterator[tuple[str, str]]:
        """Adds the database. Yields its files if it cannot be read as a database."""
        try:
            back_up(path, self._copy, self._count_attempt)
        except Exception as error:  # of any kind, because the file comes from a customer
            if getattr(error, "sqlite_errorcode", 0) == SQLITE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            print(f"{name!r} is no readable database, and is copied as it is: {error}")
            yield path, name
            for each in companions:
                yield os.path.join(os.path.dirname(path), each), os.path.join(os.path.dirname(name), each)
        else:
            self._add(self._copy, name)
        finally:
            for suffix in ("", *SUFFIXES):
                if os.path.lexists(self._copy + suffix):
                    os.unlink(self._copy + suffix)

    def _count_attempt(self) -> None:
        """Counts an attempt to read a locked database. Raises TimeoutError."""
        if self._attempts_left <= 0:
            raise TimeoutError("it is locked")
        self._attempts_left -= 1

    def _add(self, path: str, name: str) -> None:
        status = os.lstat(path)
        member = tarfile.TarInfo(name)
        member.mode, member.mtime = status.st_mode & 0o777, max(0, int(status.st_mtime))
        if stat.S_ISDIR(status.st_mode):
            member.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(status.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
            if not stays_inside(PurePosixPath(name), PurePosixPath(member.linkname)):
                print(f"{name!r} is left out: the link leaves the folder")
                return
        elif stat.S_ISREG(status.st_mode):
            self._add_file(path, member)
            return
        else:
            print(f"{name!r} is left out: it is not a file, a folder or a link")
            return
        self._tar.addfile(member)

    def _add_file(self, path: str, member: tarfile.TarInfo) -> None:
        fd = os.open(path, READ)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return
            if status.st_size > self._left:
                print(f"{member.name!r} is left out: it is too large")
                return
            self._left -= status.st_size
            member.size = status.st_size
            self._tar.addfile(member, Exact(fd, member.size))
        finally:
            os.close(fd)


def back_up(source: str, target: str, on_lock: Callable[[], None]) -> None:
    """Copies a database in one step, from a single state of it. Raises sqlite3.Error, and what `on_lock` raises.

    Opens it for writing only if a transaction that was interrupted must be rolled back first. Calls `on_lock` after
    each attempt while the database is locked.
    """
    import sqlite3  # here, because some installations of Python lack it

    try:
        _copy_database(source, target, "ro", on_lock)
    except sqlite3.OperationalError:
        _copy_database(source, target, "rw", on_lock)


def _copy_database(source: str, target: str, mode: str, on_lock: Callable[[], None]) -> None:
    import sqlite3

    def check(status: int, remaining: int, total: int) -> None:
        if status in LOCKED:
            on_lock()

    database = sqlite3.connect(f"file:{quote(source)}?mode={mode}", uri=True, timeout=ATTEMPT_SECONDS)
    try:
        copy = sqlite3.connect(target)
        try:
            copy.execute("PRAGMA synchronous=OFF")
            database.backup(copy, progress=check, sleep=0)
        finally:
            copy.close()
    finally:
        database.close()


def stays_inside(path: PurePosixPath, target: PurePosixPath) -> bool:
    """Returns whether `gateway/deploys/archives.py` accepts the link."""
    ups = 0
    while ups < len(target.parts) and target.parts[ups] == "..":
        ups += 1
    return not target.is_absolute() and ".." not in target.parts[ups:] and ups < len(path.parts)


def main(folder: str, target: str, copy: str, max_bytes: int) -> None:
    with tarfile.open(target, "w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as tar:
        Packer(tar, folder, copy, max_bytes).pack()


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
    except OSError as error:
        if error.errno in FULL:  # the code says it
            os._exit(error.errno)  # at a normal end Python would write the rest again
        raise
